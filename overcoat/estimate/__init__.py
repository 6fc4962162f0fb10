"""Predict the memory and time of a training step before renting the GPU: `overcoat estimate`, and `predict` behind it.

setup.py says how a model is trained, meter.py counts live tensors, workspaces.py the workspaces of fused
attention, phases.py marks the parts of a step and measures real steps, dry_run.py runs a step on the meta device,
fsdp.py models FSDP2, predict.py adds what is computed from shapes, times.py predicts time, fit.py finds the largest
batch, command.py and table.py are the command line.
"""

from overcoat.estimate.phases import Phase
from overcoat.estimate.predict import Prediction, Predictor, predict
from overcoat.estimate.setup import Setup

__all__ = ["Phase", "Prediction", "Predictor", "Setup", "predict"]
