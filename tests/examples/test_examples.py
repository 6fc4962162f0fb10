"""Every script of examples/ with its library: in FP8, with a plain loop's numbers, and no warning without a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor

import overcoat
from tests.examples.runs import EXAMPLES, Run, run_here, run_on_two

ON_TWO = ("accelerate_ddp", "accelerate_fsdp2", "fsdp2_loop")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
# Where the library asks for the optimizer when it wants it.
BY_THE_LIBRARY = {
    "lightning_module": "return overcoat.AdamW(self.model.parameters(), lr=2e-5, clip_grad_norm=1.0)",
    **dict.fromkeys(
        ("torchtitan_llama3", "torchtitan_transformers"),
        "_resolve_optimizer_factory = staticmethod(lambda name: overcoat.AdamW)",
    ),
}
README_LINES = ("overcoat.convert(model)", "optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)")

# What scripts are told, and why it stays.
REASONS = {
    r"'pin_memory' argument is set": "no GPU here",
    r"OMP_NUM_THREADS/MKL_NUM_THREADS unset": "accelerate launch and torchrun set it",
    r"gradient_checkpointing.* is deprecated and will be removed in v6": "TRL and PEFT call transformers by old names",
    r"isinstance\(treespec, LeafSpec\)` is deprecated": "Lightning calls PyTorch by an old name",
    r"torch.jit.script_method` is deprecated": "what torchtitan imports calls PyTorch by an old name",
    r"initial_load_model_only=True has no effect": "torchtitan says so of its own default",
    r"tokenizer has new PAD/BOS/EOS tokens": "the model was made on the spot, without a tokenizer",
}


def constant(step: int) -> float:
    return 2e-5


# ---- the plain loop ------------------------------------------------------------------------------------------------


def plain(
    runs: list[Run],
    loss_of: Callable[[Run, Any, dict[str, Any]], Tensor],
    clip: Callable[..., Any],
    rates: Callable[[int], float],
    again: bool,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each process and the weights at the end, of a loop in one process: gradients are their mean.

    again: every step begins with the weights that the script's had, which must be nearly those of this loop.
    """
    model = runs[0].models[0].train()
    overcoat.convert(model)
    defaults = {"betas": (0.9, 0.95), "weight_decay": 0.1} if loss_of is titan_loss else {}  # torchtitan's own
    optimizer = overcoat.AdamW(model.parameters(), lr=2e-5, **defaults)
    losses: list[list[float]] = [[] for _ in runs]
    before = weights_of(model)
    for step, batches in enumerate(zip(*(run.batches for run in runs))):
        if again:
            assert_nearly(flat(runs[0].starts[step]), model, before)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(runs[0].starts[step][name])
        optimizer.param_groups[0]["lr"] = rates(step)
        for rank, batch in enumerate(batches):
            loss = loss_of(runs[rank], model, batch)
            (loss / len(runs)).backward()
            losses[rank].append(loss.item())
        clip(optimizer, *runs[0].norms[step : step + 1])
        optimizer.zero_grad()
    return losses, weights_of(model)


def assert_nearly(weights: Tensor, model: Any, before: dict[str, Tensor]) -> None:
    """One rounding of FP32 in a loss may turn another in BF16: of a tenth of the weights that have moved, at most."""
    moved = (weights != flat(before)).float().mean()
    assert (weights != flat(weights_of(model))).float().mean() <= 0.1 * moved


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def step_and_clip(optimizer: Any, *_: Tensor) -> None:
    optimizer.step(clip_grad_norm=1.0)


def step_only(optimizer: Any, *_: Tensor) -> None:
    optimizer.step()


def clip_and_step(optimizer: Any, *_: Tensor) -> None:
    """As libraries do: it rounds clipped gradients to BF16."""
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def clip_by_its_norm(optimizer: Any, norm: Tensor) -> None:
    """Of shards PyTorch rounds each one's norm to BF16, so that theirs together is another in its last bits."""
    parameters = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(
        torch.nn.utils.get_total_norm([p.grad.float() for p in parameters]), norm.float(), rtol=2**-7, atol=0.0
    )
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
    optimizer.step()


def own_loss(run: Run, model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch).loss


def log_probs(model: Any, batch: dict[str, Any]) -> Tensor:
    """Of each label (B, S-1), 0 where there is none; TRL, too, computes them by itself."""
    hidden = model.model(batch["input_ids"], batch["attention_mask"], use_cache=False).last_hidden_state
    logits = F.linear(hidden[:, :-1], model.lm_head.weight).float()
    return -F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")


def sft_loss(run: Run, model: Any, batch: dict[str, Any]) -> Tensor:
    return -log_probs(model, batch).sum() / (batch["labels"][:, 1:] != -100).sum()


def dpo_loss(run: Run, model: Any, batch: dict[str, Any]) -> Tensor:
    reference = run.models[1]
    overcoat.convert(reference, eval_fp8=True)
    with torch.no_grad():
        expected = log_probs(reference, batch).sum(1)
    chosen, rejected = (log_probs(model, batch).sum(1) - expected).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo_loss(run: Run, model: Any, batch: dict[str, Any]) -> Tensor:
    is_completion = batch["labels"][:, 1:] != -100
    rows = [ids[1:][mask] for ids, mask in zip(batch["input_ids"], is_completion)]
    texts = run.script["tokenizer"].batch_decode(rows, skip_special_tokens=True)
    rewards = torch.tensor(run.script["reward"](texts))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    found = log_probs(model, batch)
    return -((found - found.detach()).exp() * advantages[:, None] * is_completion).sum() / is_completion.sum()


def titan_loss(run: Run, model: Any, batch: dict[str, Any]) -> Tensor:
    ids = batch["args"][0]
    logits = model(*batch["args"], **{name: value for name, value in batch.items() if name != "args"})
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def linear_decay(steps: int) -> Callable[[int], float]:
    return lambda step: 2e-5 * (1 - step / steps)


# How a plain loop computes the same: its loss, its clipping, its learning rates, and how far apart the losses may be.
# Bit for bit but for TRL, which adds up tokens' losses in another order, a few roundings of FP32.
PLAIN: dict[str, tuple[Any, Any, Any, float]] = {
    "trainer": (own_loss, clip_and_step, linear_decay(5), 0.0),
    "accelerate_ddp": (own_loss, clip_and_step, constant, 0.0),
    "accelerate_fsdp2": (own_loss, clip_by_its_norm, constant, 0.0),
    "fsdp2_loop": (own_loss, step_and_clip, constant, 0.0),
    "lightning_module": (own_loss, step_and_clip, constant, 0.0),
    "peft_lora": (own_loss, step_and_clip, constant, 0.0),
    "torchtitan_llama3": (titan_loss, step_only, constant, 0.0),
    "torchtitan_transformers": (titan_loss, step_only, constant, 0.0),
    "trl_sft": (sft_loss, clip_and_step, linear_decay(5), 4 * 2**-23),
    "trl_dpo": (dpo_loss, clip_and_step, linear_decay(5), 4 * 2**-23),
    "trl_grpo": (grpo_loss, clip_and_step, linear_decay(3), 4 * 2**-23),
}


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Run]]:
    """What the processes of a script did; it runs once."""
    done: dict[str, list[Run]] = {}

    def of(name: str) -> list[Run]:
        if name.startswith("torchtitan"):
            if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
                pytest.skip("torchtitan 0.3 needs a PyTorch after 2.11")
            pytest.importorskip("torchtitan", reason="torchtitan needs Python 3.11")
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                done.update(run_on_two(ON_TWO, folder) if name in ON_TWO else {name: [run_here(name)]})
        return done[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_two_lines_of_it_are_ours(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 40
    ours = [
        line.partition("  #")[0].strip() for line in text.splitlines() if "overcoat." in line and "import" not in line
    ]
    marked = [line.partition("  # <- Overcoat")[0].strip() for line in text.splitlines() if "# <- Overcoat" in line]
    assert ours == marked
    assert len(marked) == (3 if name == "trl_dpo" else 2)  # its reference model is converted, too
    convert, optimizer = README_LINES
    assert convert in marked
    assert BY_THE_LIBRARY.get(name, optimizer) in marked


def test_the_two_lines_are_the_readmes() -> None:
    lines = (EXAMPLES.parent / "README.md").read_text().splitlines()
    assert set(README_LINES) <= {line.partition("  #")[0].strip() for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_computes_in_fp8_what_a_plain_loop_does(name: str, runs: Callable[[str], list[Run]]) -> None:
    """In one test of each script: another process would run it again."""
    for run in runs(name):
        _check_fp8(name, run)
        assert not [text for text in run.said if not any(re.search(reason, text) for reason in REASONS)]
    loss_of, clip, rates, tolerance = PLAIN[name]
    model = runs(name)[0].models[0]
    if name == "torchtitan_llama3":  # converted as it was built, before its weights were drawn
        torch.manual_seed(0)
        model.init_states()
        model.bfloat16()
    before = weights_of(model)
    losses, expected = plain(runs(name), loss_of, clip, rates, again=tolerance > 0)
    weights = flat(runs(name)[0].weights)
    moved = (weights != flat(before)).float().mean()
    assert moved > 0.05
    assert (weights != flat(expected)).float().mean() <= (0.1 * moved if tolerance else 0.0)
    for run, own in zip(runs(name), losses, strict=True):
        assert len(run.losses) == len(own) > 2
        # Absolute, too: GRPO's loss is a sum of terms near 1 that is 0 but for their rounding.
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(own), rtol=tolerance, atol=tolerance)


def _check_fp8(name: str, run: Run) -> None:
    assert {ran for part, ran in run.ran.items() if "layers" in part} == {"FP8"}
    # TRL and torchtitan compute the loss themselves.
    assert name.startswith(("trl", "torchtitan")) or "loss without logits" in run.ran.values()
    assert "fsdp2" not in name or run.script["class"].startswith("FSDP")
    assert name != "accelerate_ddp" or run.script["class"] == "DistributedDataParallel"
