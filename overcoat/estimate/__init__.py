"""What a training step will hold, before renting the GPU: `overcoat estimate`, and `predict` behind it.

setup.py says how a model is trained, meter.py counts living tensors, workspaces.py what fused attention takes,
phases.py says where a step's parts begin and measures real ones, dry_run.py runs a step on the meta device, fsdp.py
takes FSDP2's part in it, predict.py adds what is counted from shapes, times.py says how long a step takes, fit.py finds
what fits, command.py and table.py are the command line.
"""

from overcoat.estimate.phases import Phase
from overcoat.estimate.predict import Prediction, Predictor, predict
from overcoat.estimate.setup import Setup

__all__ = ["Phase", "Prediction", "Predictor", "Setup", "predict"]
