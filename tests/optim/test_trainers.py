"""AdamW under the trainers that people have, their real libraries: who clips, and who says so."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from overcoat import AdamW, release_gradients

CLIP = 1e-3


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return {"x": torch.full((8,), float(row))}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(self.first(x)).square().mean()}


def with_lightning(model, optimizer, clip, steps, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Script(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return optimizer

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", gradient_clip_val=clip, max_steps=steps, **quiet
    )
    trainer.fit(Script(), torch.utils.data.DataLoader(Rows(), batch_size=4))


def with_transformers(model, optimizer, clip, steps, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {"per_device_train_batch_size": 4, "max_steps": steps, "report_to": "none", "use_cpu": True, "bf16": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_grad_norm=clip,
        save_strategy="no",
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **options,
    )
    transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None)).train()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize("fit", [with_lightning, with_transformers])
def test_trainers_clip_in_bf16_and_released_gradients_say_that_nothing_is(fit, tmp_path):
    """Clipped, a step's m is at most 0.1 of the limit; that of a released one is what it was."""
    norms = {}
    for name, clip, release in (("clipped", CLIP, False), ("released", CLIP, True), ("silent", 0, True)):
        model = Model()
        optimizer = AdamW(model.parameters(), moments="fp32")
        if release:
            release_gradients(model, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, optimizer, clip, 2, tmp_path)
        said = [str(each.message) for each in caught if "release_gradients" in str(each.message)]
        assert len(said) == (name == "released"), said
        assert all(f"={CLIP} clips nothing" in text for text in said)
        assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())
        squares = sum(optimizer.state[p]["exp_avg"].square().sum() for p in model.parameters())
        norms[name] = math.sqrt(squares)
    assert 0 < norms["clipped"] < 0.2 * CLIP
    assert norms["released"] == norms["silent"] > 10 * CLIP
