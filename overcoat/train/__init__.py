"""Training: configuration, data, the loop, checkpoints and what a run reports. Start reading at `run.py`."""
