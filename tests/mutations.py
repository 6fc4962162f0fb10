"""python -m tests.mutations [WORD ...]     break the code in many ways; the tests must notice each

Every mutation replaces one piece of text, in a copy of the tree, and runs the tests beside it, which must fail. A
mutation whose text is gone is an error: write it anew. Without words all run, two at a time (some minutes; JOBS=1 in
the environment: one); with words those whose name holds one of them. Exit status 1 if one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """What is broken: the file under overcoat/, the text, once in it, and what takes its place; who must notice."""

    name: str
    path: str
    text: str
    replacement: str
    tests: str  # under tests/, with options of pytest


# (name, file under overcoat/, text, once in it, what takes its place, who must notice: under tests/, with options)
MUTATIONS = [Mutation(*fields) for fields in (
    ("group: off by one", "formats/groups.py",
     "padded.shape[1] // group_size, group_size)", "padded.shape[1] // group_size, group_size).roll(1, 1)",
     "formats/test_groups.py"),
    ("group: int8 scale of 128", "formats/groups.py",
     "groups * _ratio(127.0, amax)", "groups * _ratio(126.0, amax)", "formats/test_groups.py"),
    ("group: sqrt8 loses the sign", "formats/groups.py",
     "torch.copysign(root, groups)", "root", "formats/test_groups.py"),
    ("float8: no saturation", "formats/float8.py",
     "x.clamp(-fmt.max, fmt.max).to(fmt.dtype)", "x.to(fmt.dtype)", "formats/test_float8.py"),
    ("float8: scale of zero", "formats/float8.py",
     "torch.where(amax == 0, torch.ones_like(scale), scale)", "scale", "formats/test_float8.py"),
    ("master: remainder of another width", "formats/masters.py",
     "<< (8 if remainder.dtype", "<< (7 if remainder.dtype", "formats/test_masters.py"),
    ("loss: hidden labels count", "kernels/loss.py",
     "    counted = labels != ignore_index", "    counted = labels != ignore_index - 1", "kernels/test_loss.py"),
    ("padding of tokens", "kernels/quantize.py",
     "(tokens + TOKEN_MULTIPLE - 1) // TOKEN_MULTIPLE", "tokens // TOKEN_MULTIPLE", "kernels/test_quantize.py"),
    ("attention: lse without its mask", "kernels/attention.py",
     "scores = scale * scores", "scores = 1.01 * scale * scores", "kernels/test_attention.py"),
    ("packed: a document too late", "kernels/attention.py",
     "position_ids.diff(dim=-1) != 1", "position_ids.diff(dim=-1) > 1", "kernels/test_packed.py"),
    ("packed: documents see the future", "kernels/attention.py",
     "device=device).tril()", "device=device).triu()", "kernels/test_packed.py"),
    ("center of other rows", "kernels/groups.py",
     "x[::step].mean(0,", "1.1 * x[::step].mean(0,", "kernels/test_groups.py"),
    ("v near 0 becomes an error of its center", "kernels/heads.py",
     "v.abs().amax(-1) < moved.abs().amax(-1)", "v.abs().amax(-1) < 0.0 * moved.abs().amax(-1)",
     "kernels/test_rope.py"),
    ("adamw: weight decay is dropped", "kernels/adamw.py",
     "keep = (1.0 - rate * weight_decay)", "keep = (1.0 - 0.0 * rate * weight_decay)", "optim/test_adamw.py"),
    ("adamw: bias correction of v", "kernels/adamw.py",
     "bias = torch.sqrt(1.0 - torch.exp2(t * log2))", "bias = torch.sqrt(1.0 - torch.exp2((t + 1) * log2))",
     "optim/test_adamw.py"),
    ("adamw: the step does not count", "kernels/adamw_step.py",
     "torch._foreach_add_(states[\"step\"], 1.0)", "torch._foreach_add_(states[\"step\"], 2.0)", "optim/test_adamw.py"),
    ("adamw: all step as the first", "kernels/adamw.py",
     "coefficients[groups.owner]", "coefficients[0 * groups.owner]", "kernels/test_adamw.py"),
    ("adamw: all draw as the first", "kernels/adamw.py",
     "group_bits(key_of[groups.owner]", "group_bits(key_of[0 * groups.owner]", "kernels/test_adamw.py"),
    ("muon: Nesterov left out", "kernels/muon.py",
     "fma(m, m.new_full((), mu), addend) if hyper.nesterov else m", "m", "optim/test_muon.py -k path"),
    ("muon: all segments of one size", "kernels/muon.py",
     "SEGMENT = (3, 2)", "SEGMENT = (5, 5)", "optim/test_muon.py -k direction"),
    ("muon: inputs for outputs", "optim/muon_step.py",
     "1 / ratio if group[\"transposed\"] else ratio", "ratio", "optim/test_muon.py -k spectral_scale"),
    ("muon: rows of another process", "optim/muon_step.py",
     "matrix.start + row - first for row", "matrix.start + row for row", "optim/test_muon.py -k step_as_one"),
    ("muon: an offloaded piece's update", "optim/muon_offload.py",
     "part.offset + (piece.start - part.piece.start) * columns", "part.offset",
     "optim/test_muon_offload.py -k ordinary_ones"),
    ("adamw: a skipped step is taken", "kernels/adamw_step.py",
     "if not skipped]", "]", "optim/test_adamw.py"),
    ("adamw: clipping is skipped", "optim/adamw.py",
     "factor = clip if scale is None else factor * clip", "factor = factor", "optim/test_adamw.py"),
    ("adamw: norms below the limit grow", "optim/adamw.py", ".clamp(max=1.0)", "", "optim/test_adamw.py"),
    ("adamw: clipping with another eps", "optim/adamw.py",
     "self.grad_norm + 1e-6", "self.grad_norm + 1e-2", "optim/test_adamw.py -k clipping_equals_the_formula"),
    ("block: the residual is dropped", "block/run.py",
     "norm_linear_forward(x, y, branch.pre", "norm_linear_forward(x, None if y is None else 0 * y, branch.pre",
     "block/test_run.py -k test_block"),
    ("linear: a bias gradient is dropped", "block/linear.py",
     "dy.sum(0, dtype=torch.float32)", "0 * dy.sum(0, dtype=torch.float32)", "block/test_linear.py"),
    ("attention: max |o| is too low", "kernels/rope.py",
     "MARGIN = 1.0 + 2.0**-7", "MARGIN = 0.5", "block/test_attention.py -k own_maximum"),
    ("head: labels are not shifted", "models/head.py",
     "F.pad(labels, (0, 1), value=ignore_index)[..., 1:]", "labels", "models/test_head.py"),
    ("head: logits are not scaled", "models/head.py", "scale != 1.0", "scale == -1.0", "models/test_head.py"),
    ("mask: a window is forgotten", "kernels/attention.py",
     "visible.triu(1 - window) if window else visible", "visible", "models/test_causal.py"),
    ("mask: positions that are no rows'", "models/masks.py",
     "if num_documents == batch:", "if num_documents >= batch:", "models/test_causal.py"),
    ("train: labels of one micro-batch", "train/loop.py",
     "/ (num_labels * config.parallel.context)", "/ ((num_labels + 1) * config.parallel.context)",
     "train/test_loop.py"),
    ("train: evaluation's mean", "train/loop.py",
     "return float(process.sum_of(total)) /", "return 0.99 * float(process.sum_of(total)) /", "train/test_loop.py"),
    ("checkpoint: no checksum", "train/files.py",
     '"sha256": digest.hexdigest()', '"sha256": "0"', "train/test_files.py"),
    ("files: a rename is not synced", "train/files.py",
     "    sync(target.parent)\n", "", "train/test_files.py -k synced_after"),
    ("report: nothing is escaped", "report/command.py",
     "html.escape(str(value))", "str(value)", "report/test_page.py -k is_escaped"),
    ("checkpoint: strays are loaded", "train/checkpoint.py",
     "        if strays:", "        if False:", "train/test_checkpoint.py"),
    ("config: another configuration resumes", "train/checkpoint.py",
     "            not changed,", "            True,", "train/test_checkpoint.py"),
    ("attention: sinks are ignored", "block/attention.py",
     "    if rotary.sinks is None:\n", "    if True:\n", "models/test_numerics.py -k gpt_oss"),
    ("attention: a sink's gradient is dropped", "block/attention.py",
     "return -((sinks", "return 0 * ((sinks", "models/test_numerics.py -k gpt_oss"),
    ("attention: scores are not capped", "block/attention.py",
     "o, lse = attention_op(rotated, *shape, heads.causal, heads.softcap, heads.window)",
     "o, lse = attention_op(rotated, *shape, heads.causal, 0.0, heads.window)",
     "models/test_scores.py -k gemma2"),
    ("attention: q is not scaled", "block/attention.py",
     "    if rotary.q_scale is not None:\n        scale_q(rotated[", "    if False:\n        scale_q(rotated[",
     "models/test_numerics.py -k ministral3"),
    ("branch: the residual's multiplier is ignored", "models/families/llama.py",
     "float(layer.residual_multiplier)", "1.0", "models/test_numerics.py -k granite"),
    ("mask: a window off by one", "kernels/attention.py",
     "visible.triu(1 - window)", "visible.triu(-window)", "models/test_causal.py"),
    ("adamw: bias correction of m", "kernels/adamw.py",
     "(1.0 - torch.exp2(t * log1))", "(1.0 - torch.exp2(t * log2))", "optim/test_adamw.py"),
    ("adamw: eps is not corrected", "kernels/adamw.py",
     "bias * eps, keep", "0 * bias + eps, keep", "optim/test_adamw.py"),
    ("norm: no eps", "kernels/norm.py", "mean(-1) + eps)", "mean(-1))", "kernels/test_norm.py"),
    ("norm: the residual's gradient is dropped", "kernels/norm.py",
     "dx = dx + dresidual.float()", "pass", "kernels/test_norm.py"),
    ("norm: bias gradient of another sum", "kernels/norm.py",
     "wide.sum(0) if has_bias", "wide[1:].sum(0) if has_bias", "kernels/test_norm.py"),
    ("norm: the projection is dropped", "kernels/norm.py",
     "dx = g - xhat * (g * xhat).mean(-1, keepdim=True)", "dx = g", "block/test_norm.py"),
    ("experts: one scale for all that travel", "distributed/sharded_weight.py",
     "quantize_experts(rows, expert_amax(rows), False)",
     "quantize_experts(rows, expert_amax(rows).amax().expand(len(rows)), False)",
     "distributed/test_fp8_all_gather.py -k experts"),
    ("gather: a backward reads what was gathered last", "distributed/fp8_all_gather.py",
     "if in_fp8 == [weight.is_fp8 for weight in self.weights]:", "if True:",
     "distributed/test_fp8_all_gather.py -k whatever_comes"),
    ("gather: a backward reads what the mode says", "distributed/sharded_weight.py",
     "if self.group._training_state is not TrainingState.PRE_BACKWARD:", "if True:",
     "distributed/test_fp8_all_gather.py -k whatever_comes"),
    ("gather: a forward reads what is gathered", "distributed/fp8_all_gather.py",
     "if any(weight.is_fp8 != weight.layer.training for weight in self.weights):", "if False:",
     "distributed/test_fp8_all_gather.py -k whatever_comes"),
    ("gather: left to FSDP2 in a second backward", "distributed/fp8_all_gather.py",
     "for group in groups:  # FSDP2 does not", "for group in ():  # FSDP2 does not",
     "distributed/test_fp8_all_gather.py -k whatever_comes"),
    ("gather: a prefetch in the other dtype is forgotten", "distributed/fp8_all_gather.py",
     "group.wait_for_unshard()  # of a prefetch", "pass  # of a prefetch",
     "distributed/test_fp8_all_gather.py -k whatever_comes"),
    ("stream: a backward after a step", "streaming/stream.py",
     "if layer.changes != changes:", "if False:", "streaming/test_stream.py -k cannot_work_later"),
    ("ranges: rows of zeros have underflowed", "models/recording.py",
     "(zero * used).sum()", "zero.sum()", "models/test_eval_fp8.py -k rows_of_zeros"),
    ("stream: masks are made anew", "models/fingerprint.py",
     '"overcoat.distributed", "overcoat.streaming")', '"overcoat.distributed")', "streaming/test_stream.py -k no_mask"),
    ("experts: routing weights do not count in the gradient", "kernels/experts.py",
     "return (wide * weights[:, None]).to(g.dtype)", "return wide.to(g.dtype)", "block/test_experts.py -x"),
    ("experts: what was cut has a gradient", "block/experts.py",
     "        mask_(wide, clipped)", "        mask_(wide, 0 * clipped)", "block/test_experts.py -x"),
    ("experts: the last slot of a tile is lost", "kernels/grouped.py",
     "+ rows - 1) // rows).cumsum(0)", ") // rows).cumsum(0)", "kernels/test_grouped.py -x"),
    ("experts: any activation will do", "models/experts.py",
     "decibels(expected[half], found[half]) >= LIMIT_DB", "decibels(expected[half], found[half]) >= 3",
     "models/test_experts.py -x"),
    ("gate: the output layer's weight gradient of o", "block/attention.py",
     "h = decoded.o if g is None else gate(decoded.o, g)[0]", "h = decoded.o", "block/test_run.py -k test_block"),
    ("gate: its gradient is that of an open one", "kernels/gate.py",
     "(do * o * (1.0 - s)).to(dh.dtype)", "(do * o).to(dh.dtype)", "block/test_run.py -k test_block"),
    ("gate: taken for q", "block/spec.py",
     "(rest, ordered) if self.gate_interleaved", "(ordered, rest) if False", "models/test_gates.py"),
    ("attention: norms of q and k in another order than their rows", "models/decoder.py",
     "        if not (heads.rotated or heads.rope_interleaved):\n            return weight", "        return weight",
     "models/test_gates.py"),
    ("mlp: a gate's gradient of another size", "kernels/activation.py",
     "torch.cat((dh * up[0] * slope,", "torch.cat((0.85 * dh * up[0] * slope,", "models/test_numerics.py -k mistral"),
    ("mlp: an up's gradient of another size", "kernels/activation.py",
     "slope, dh * value), -1)", "slope, 0.85 * dh * value), -1)", "models/test_numerics.py -k mistral"),
    ("rope: q is not rotated back", "kernels/rope.py",
     "rotate_back(gq, cos, sin), q, q_weight", "gq, q, q_weight", "block/test_attention.py"),
    ("mlp: up is ignored", "kernels/activation.py",
     "return h * up[0] if gated else h", "return h", "kernels/test_activation.py"),
    ("block: parallel branches in a row", "block/run.py",
     "d, d_amax = dy, None", "pass", "block/test_run.py -k test_block"),
    ("master: the remainder is dropped", "formats/masters.py",
     "(bits >> 8).to(torch.int8)", "(0 * bits).to(torch.int8)", "formats/test_masters.py"),
    ("rounding: the seed does not advance", "formats/masters.py",
     "mix(mix(key + step.to(torch.int32) * GOLDEN)", "mix(mix(key + 0 * step.to(torch.int32))",
     "formats/test_masters.py"),
    ("estimate: products at half their operations", "estimate/times.py",
     "kind, 2 * args[0].numel() * args[1].shape[0]", "kind, args[0].numel() * args[1].shape[0]",
     "estimate/test_times.py"),
    ("estimate: a hybrid's hosts do not talk", "estimate/times.py",
     "if cluster.hybrid and cluster.nodes > 1:", "if False:", "estimate/test_times.py"),
    ("benchmarks: every process has the same rows", "../benchmarks/model.py",
     "torch.manual_seed(dist.get_rank() if work.gpus else 0)", "torch.manual_seed(0)",
     "benchmarks/test_model.py -k peers_under_fsdp"),
    ("release: no waiting for a layer", "optim/release.py",
     "return self.missing[number] <= 0", "return True", "optim/test_release.py"),
    ("sharding: uneven rows", "optim/sharding.py",
     "-(-rows // mesh.size(dim))", "(rows // mesh.size(dim))", "optim/test_sharding.py"),
    ("sharding: a norm of one shard", "optim/sharding.py",
     "dist.all_reduce(together,", "0 and dist.all_reduce(together,", "optim/test_sharding.py"),
    ("parallel: gradients are divided by the processes", "train/parallel.py",
     "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)",
     "train/test_parallel.py -k a_run_of_two_ends"),
    ("parallel: all processes take the first rows", "train/process.py",
     "rows[place * size : (place + 1) * size]", "rows[:size]", "train/test_parallel.py -k a_run_of_two_ends"),
    ("schedule: the first step does not move", "train/loop.py",
     "return (step + 1) / warmup", "return step / warmup", "train/test_loop.py -k warmup"),
    ("checkpoint: the data's position is lost", "train/state.py",
     'self.rows.load_state_dict(rows)', "pass", "train/test_loop.py"),
    ("checkpoint: generators are lost", "train/state.py",
     "            set_rng_state(record[\"rng\"][process.rank()])", "            pass", "train/test_loop.py"),
    ("checkpoint: the rows of a step are lost", "train/state.py",
     'tensors["drawn"].numpy() if "drawn" in tensors else None', "None", "train/test_loop.py"),
    ("data: labels of the next document", "train/data.py",
     "labels[inputs == eos] = IGNORED", "pass", "train/test_data.py"),
    ("offload: a copy is not waited for", "block/offload.py",
     "self.transfers.wait_for(self.arrived)", "pass", "block/test_offload.py -k before_it_was_copied"),
    ("images: one token further", "models/images.py",
     "flat.cumsum(0) - 1", "flat.cumsum(0)", "models/test_images.py -k places"),
    ("images: transformers' masks", "models/images.py",
     "if func is Tensor.masked_scatter and", "if False and", "models/test_images.py -k nobody_waits"),
    ("estimate: a frozen tower has states", "estimate/predict.py",
     "for parameter in trained:", "for parameter in parameters:",
     "estimate/test_predict.py -k measured_peaks_of_llava"),
    ("lora: dx without the adapters", "block/adapters.py",
     "        dx.addmm_(g, stacked.a)\n", "",
     "models/test_lora.py -k as_good_as"),
    ("lora: A's gradient without the norm's weight", "block/adapters.py",
     "            da = da * scale\n", "            pass\n",
     "models/test_lora.py -k as_good_as"),
    ("lora: A's gradient without the norm's bias", "block/adapters.py",
     "        da = da + torch.outer(", "        da = da + 0 * torch.outer(",
     "models/test_lora.py -k starcoder2"),
    ("lora: B's rows as they are", "block/adapters.py",
     "b[rows, columns] = (own if order is None else order.take(own))", "b[rows, columns] = own",
     "models/test_lora.py -k gpt_neox"),
    ("lora: the linear layer's scale left out", "block/adapters.py",
     "order.take(own)) * (adapter.scaling * linear.scale)", "order.take(own)) * adapter.scaling",
     "models/test_lora.py -k granite"),
    ("dora: the magnitudes' gradient without adapters", "block/adapters.py",
     "v.addmm_(_down(a, linear, inputs, dy.dtype), b.t())", "v.addmm_(_down(0 * a, linear, inputs, dy.dtype), b.t())",
     "models/test_lora.py -k as_good_as"),
    ("dora: dy as it is", "block/adapters.py",
     "return (dy * _factors(linear)).to(dy.dtype),", "return dy,", "models/test_lora.py -k as_good_as"),
    ("dora: gradients of biases by way of the magnitudes", "block/adapters.py",
     "sums = dy.sum(0, dtype=torch.float32)", "sums = (dy * _factors(linear)).sum(0, dtype=torch.float32)",
     "models/test_lora.py -k trains_biases"),
    ("dora: norms of the base", "models/lora.py",
     "squares + scaling * (across * b).sum(1)", "squares", "models/test_lora.py -k small_twin"),
    ("lora: dropout left out of dx", "block/adapters.py",
     "dropped(torch.mm(g[:, columns], stacked.a[columns]), adapter)", "torch.mm(g[:, columns], stacked.a[columns])",
     "models/test_lora.py -k dropout_trains"),
    ("lora: dropout with the seed of the model's first forward", "models/decoder.py",
     "with_seeds(block_of(called, family, self))", "block_of(called, family, self)",
     "models/test_lora.py -k dropout"),
    ("frozen: a scale for each weight of a stack", "models/frozen.py",
     "torch.stack([amax(weight) for weight in weights]).amax()", "amax(weights[0])",
     "models/test_frozen.py -k no_bit"),
    ("frozen: scales of the first rows for all shards", "models/frozen.py",
     "torch.arange(first, first + rows,", "torch.arange(0, rows,", "models/test_frozen.py -k rows_are"),
    ("bitsandbytes: the lower half first", "train/quantized_4bit.py",
     "[pairs >> 4, pairs & 15]", "[pairs & 15, pairs >> 4]", "train/test_quantized.py -k 4_bit"),
    ("export: q, k and v apart", "models/fp8_weights.py",
     "if all(map(fits, names)) for name in names}", "for name in names if fits(name)}",
     "export/test_export.py -k stay_in_bf16"),
    ("eval_fp8: not set", "models/decoder.py",
     "if not self.training and not self.overcoat_eval:", "if not self.training:",
     "models/test_eval_fp8.py"),
)]  # fmt: skip


def survives(mutation: Mutation) -> str:
    """ "" if the tests notice, else what happened."""
    source = (ROOT / "overcoat" / mutation.path).read_text()
    if source.count(mutation.text) != 1:
        return f"its text is {source.count(mutation.text)} times in {mutation.path}"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("overcoat", "tests", "benchmarks", "configs"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        (Path(folder) / "overcoat" / mutation.path).write_text(source.replace(mutation.text, mutation.replacement))
        first, *options = mutation.tests.split(" ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{first}", *options]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    last = (ended.stdout.strip() or ended.stderr.strip()).splitlines()[-1]
    return "" if ended.returncode == 1 else f"pytest ended with {ended.returncode}: {last}"


def main(words: list[str]) -> int:
    """Run, and print a line for each."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    survivors = 0
    with ThreadPoolExecutor(int(os.environ.get("JOBS", 2))) as pool:
        for mutation, fault in zip(chosen, pool.map(survives, chosen), strict=True):
            survivors += bool(fault)
            print(f"SURVIVED {mutation.name}: {fault}" if fault else f"caught   {mutation.name}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} not caught")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
