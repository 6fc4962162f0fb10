"""`overcoat bench`: this project and its peers, measured in one run on one GPU.

command.py                       the sub-command
optimizer.py layer.py model.py   a step, a decoder block, whole training steps: ours and the installed peers
kernels.py                       every kernel of a training step against the copy bandwidth
contestants.py transformer_engine.py    who takes part, in decoder blocks and in whole steps
session.py                       measurements, each in a process of its own, printed and written as they come
rows.py output.py                results as JSON lines; as text and as bars
shapes.py timing.py              decoder blocks and models to run; the clock
"""
