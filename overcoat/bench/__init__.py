"""`overcoat bench`: this project and its peers, measured in one run on one GPU.

command.py                          the sub-command and its options
optimizer.py layer.py model.py      a step, a decoder block, whole training steps: ours and the installed peers
kernels.py kernel_cases.py          every kernel of a block against the copy bandwidth
blocks.py trainers.py transformer_engine.py    who takes part, in decoder blocks and in whole steps
session.py worker.py                measurements run in a child process, so a crash or a hang of one hides no other
rows.py output.py                   results as JSON lines; as text and as bars
shapes.py timing.py                 decoder blocks by name; the clock
"""
