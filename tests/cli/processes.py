"""The console script in a process of its own.

A new interpreter needs seconds to import torch. So a server, one for each process that runs tests, imports it once and
forks for each call: what runs there has its own standard streams, environment, folder, exit code and end, as if it had
been started by itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = "from attnres_compile.cli.main import run\nrun()"
# What is looked at when an interpreter starts or a library is imported.
AT_START = {"FORCE_COLOR", "NO_COLOR", "PYTHONIOENCODING"}
SECONDS = 300

# A call is an end of the loop in a forked process, which goes on as ``python -c`` does.
_SERVER = """
import json, os, socket, sys
import torch._dynamo
import attnres_compile.cli.main
calls = socket.socket(fileno=int(sys.argv[1]))
while True:
    text, files, _, _ = socket.recv_fds(calls, 1 << 16, 3)
    while text and not text.endswith(b"\\n"):
        text += calls.recv(1 << 16)
    if not text:
        os._exit(0)
    pid = os.fork()
    if not pid:
        break
    for file in files:
        os.close(file)
    calls.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
calls.close()
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
call = json.loads(text)
os.environ.clear()
os.environ.update(call["environment"])
os.chdir(call["folder"])
sys.argv = ["-c", *call["arguments"]]
exec(call["code"])
"""


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process: this package to be found, no colours said, one thread."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def attnres(*arguments: str, code: str = "", fresh: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs ``attnres`` and catches its output.

    Args:
        arguments: of the command line.
        code: runs before it.
        fresh: in an interpreter of its own that has imported nothing.
        more: is added to the environment.
    """
    code = f"{code}\n{RUN}"
    if fresh or AT_START & set(more):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=SECONDS)
    call = {"arguments": arguments, "code": code, "environment": environment(**more), "folder": os.getcwd()}
    with open(os.devnull) as empty, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        server = _server()
        socket.send_fds(server, [json.dumps(call).encode() + b"\n"], [file.fileno() for file in (empty, out, err)])
        ended = int(server.recv(64))
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, ended, out.read().decode(), err.read().decode())


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair()
    command = [sys.executable, "-c", _SERVER, str(its.fileno())]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], cwd=ROOT)
    its.close()
    ours.settimeout(SECONDS)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
