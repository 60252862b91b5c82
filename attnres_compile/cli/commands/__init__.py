"""The commands, one file each: they load a target, ask the library, and show its answer."""
