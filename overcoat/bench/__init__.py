"""`overcoat bench`: this project and its peers, measured in one run on one GPU.

command.py                          the sub-command and its options
optimizer.py layer.py model.py      a step, a decoder block, whole training steps: ours and the installed peers
kernels.py                          every kernel of a block against the copy bandwidth
blocks.py transformer_engine.py coat.py    the peers' decoder blocks
session.py worker.py                measurements run in a child process, so a crash or a hang of one hides no other
rows.py table.py plot.py            results as JSON lines, as text, as bars
shapes.py timing.py                 models by name; the clock
"""
