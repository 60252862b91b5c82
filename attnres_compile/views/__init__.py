"""How reports are shown: in a terminal, in a notebook, as a page of HTML, as a plot. Nothing here computes."""
