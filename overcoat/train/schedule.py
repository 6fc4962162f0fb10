"""Learning-rate schedules as one pure function of the step, so that resuming needs nothing but the step.

With S steps, W of warm-up and the final ratio f, step s = 0 .. S-1 is taken with lr(s) = peak *
multiplier(s):

    warm-up   s < W:  (s + 1) / W                                    the first step already moves
    cosine    f + (1 - f) * (1 + cos(pi * t)) / 2,                   t = (s - W) / (S - W), from 0 towards 1
    linear    1 - (1 - f) * t
    wsd       1 until S - D, then 1 - (1 - f) * (s - (S - D)) / D    stable, then decay over the last D steps
    constant  1
"""

from __future__ import annotations

import math

from overcoat.train.config import ScheduleConfig


def decay_length(schedule: ScheduleConfig, num_steps: int) -> int:
    """D of the wsd schedule: as configured, or a fifth of all steps, and never reaching into the warm-up."""
    return schedule.decay_steps or min(max(1, num_steps // 5), num_steps - schedule.warmup_steps)


def multiplier(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """The factor on the peak learning rate for the 0-based `step` of `num_steps`."""
    warmup, final = schedule.warmup_steps, schedule.final_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / (num_steps - warmup))
    if schedule.kind == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.kind == "linear":
        return 1 - (1 - final) * progress
    if schedule.kind == "wsd":
        decay = decay_length(schedule, num_steps)
        return 1 - (1 - final) * min(1.0, max(0, step - (num_steps - decay)) / decay)
    return 1.0
