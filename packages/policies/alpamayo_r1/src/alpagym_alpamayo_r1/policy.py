"""Alpamayo as a policy of the contract: observations in, plans out, by trajectory tokens or by the action expert.

A decision is written in up to two parts: reasoning (`reasoning_tokens`, free text up to `<|traj_future_start|>`), then
the plan. `tokens`: 128 tokens (fewer with `decided_s`), each drawn among the future's bins only (an unconstrained
completion need not be a plan at all). `expert`: ten denoising steps, drawn (`action_expert.Chain`). `log_prob` has one
factor a token of reasoning, then one a trajectory token or drawn step; `score` computes the same factors again from the
trace: tokens by one forward over what was written, under the same temperature and top-p, and steps from the recorded
chain.

A batch is cut into forwards of exactly `rows` observations: a row's bits then do not depend on what stands beside it.
All rows of a forward have the same words but for their histories, so nothing is padded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alpagym_alpamayo_r1.action_expert import Chain, euler, flow_loss, training_times
from alpagym_alpamayo_r1.architecture import Architecture
from alpagym_alpamayo_r1.checkpoints import load_model
from alpagym_alpamayo_r1.config import CAMERA_NAMES, Alpamayo1Config, Alpamayo15Config, AlpamayoTinyConfig
from alpagym_alpamayo_r1.engine import GraphEngine
from alpagym_alpamayo_r1.model import AlpamayoModel, Prefix
from alpagym_alpamayo_r1.processing import Batch, Patches, Processor, Sample
from alpagym_alpamayo_r1.prompt import PromptLayout
from alpagym_alpamayo_r1.sampling import complete, inverse_draw, log_distribution
from alpagym_alpamayo_r1.tiny import TinySize, make_tiny
from alpagym_alpamayo_r1.vision_cache import VisionCache
from alpagym_alpamayo_r1.vllm_engine import Prompt, VllmEngine, one_pad_each
from alpagym_plugins import ConfigError
from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.random import mix, normal, uniform
from alpagym_runtime.trainers.lora import merged
from alpagym_runtime.types import Decision, Observation, PolicySpec, Ragged, Sampling, Score

Config = Alpamayo1Config | Alpamayo15Config | AlpamayoTinyConfig

TEXT_STREAM, PLAN_STREAM = 1, 0  # of a decision's seed


@dataclass(frozen=True)
class Written:
    """Reasoning that B rows wrote.

    Attributes:
        ids: [B,R] i64, -1 behind the end; a row that came to `<|traj_future_start|>` holds it last.
        log_prob: [B,R] f32, 0 behind the end.

    """

    ids: Tensor
    log_prob: Tensor


class AlpamayoPolicy:
    """See the module's text; implements `alpagym_runtime.types.ImitatingPolicy`."""

    def __init__(self, config: Config, model: AlpamayoModel, processor: Processor, device: str = "cpu") -> None:
        self.spec: PolicySpec = config.spec()
        self.version = 0
        self.prompts_read = 0  # by the engine
        self.device = torch.device(device)
        # A row's bits are its own on a CPU only, and a forward that is learned from takes 24 GB a row of a release.
        self._on_cpu = self.device.type == "cpu"
        self.processor = processor
        self.module: nn.Module = model.to(self.device).eval()
        self._rows = config.rows
        self._head = config.head
        self._cameras = tuple(CAMERA_NAMES.index(name) for name in config.cameras)
        if config.head == "expert" and not model.with_expert:
            raise ConfigError("'expert' needs a checkpoint with an action expert; this one has none", key="head")
        architecture = model.architecture
        pictures = ("image",) if self._cameras else ()
        self._reasons = config.reasoning_tokens
        self._train_backbone = config.train_backbone
        self._noise_level, self._noise_steps = config.noise_level, config.noise_steps
        self._correlation = config.noise_correlation
        self._noise_modes = config.noise_modes
        self._decided = min(
            round(config.decided_s / model.future.action_space.step_s), model.future.action_space.waypoints
        )
        self._frames = config.frames
        self._patches = Patches(processor.image_processor, self.device)
        self._exact = not self._cameras or self._patches.fits(config.height, config.width)
        self._engine = GraphEngine(model, self._rows, config.context) if config.engine == "graph" else None
        self._vllm = self._start_vllm(config) if config.engine == "vllm" else None
        self._seen: VisionCache | None = None
        if config.engine != "eager" and not self._exact:
            raise ConfigError(
                f"engine {config.engine} takes pictures as they are; {config.height} x {config.width} px would be "
                "resized to the checkpoint's range of pixels",
                key="policy.height",
            )
        if self._engine is not None and self._cameras:
            # Twice what a forward sees: what left the window of one slot is rarely asked for again.
            self._seen = VisionCache(
                self._engine.see, self._patches, 2 * self._rows * len(self._cameras) * self._frames
            )
        asked = ("cot",) if self._reasons else ("traj_future",)
        self.layout = PromptLayout(
            (*pictures, "traj_history", "prompt", *asked),
            ("cot", "traj_future") if self._reasons else ("traj_future",),
            (),
            **_picture_words(config.picture_words, architecture),
        )
        self._recompute = config.gradient_checkpointing
        if self._recompute:
            model.vlm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def _model(self) -> AlpamayoModel:
        """The module in hand: while a trainer holds the weights in another one, that."""
        return cast(AlpamayoModel, self.module)

    # ---------------------------------------------------------------- acting

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3].

        The trace has what `score` needs: `tokens` [N,J] i64 bins or `denoising` [N,F+1,T,2] f32, of F steps that are
        drawn; `reasoning` [N,R] i64 ids (-1 behind the end); and `text`, a row of UTF-8 bytes each, markers included. A
        row with a number that is not finite is decided once more, in another forward, then fails alone; one that was
        given such a number fails at once.
        """
        decision = self._act(observations, seeds, sampling)
        known = _known(observations)
        bad = np.flatnonzero(known & ~_finite(decision))
        if len(bad):
            again = self._act({name: values[bad] for name, values in observations.items()}, seeds[bad], sampling)
            order = np.arange(len(seeds))
            order[bad] = len(seeds) + np.arange(len(bad))
            decision = Decision.concatenate([decision, again]).take(order)
        failed = ~(known & _finite(decision))
        if failed.any():
            decision.plan_rig[failed] = 0.0
            decision.log_prob[failed] = 0.0
            texts = ["its history is not finite", "the model gave numbers that are not finite, twice"]
            error = [texts[int(k)] if f else None for f, k in zip(failed, known, strict=True)]
            decision.error = np.array(error, object)
        return decision

    def score(self, observations: Observation, decisions: Decision, sampling: Sampling) -> Score:
        """Log-probability [N,J] of what the trace holds, and the mean entropy [N] of the plan's distributions.

        Raises:
            ConfigError: the decisions hold no chain: the expert drew them with noise_level 0, or in mode mean.

        """
        if self._head == "expert" and "denoising" not in decisions.trace:
            raise ConfigError(
                "decisions of the expert have a log-probability only where they were sampled with noise above 0",
                key="policy.noise_level",
            )
        factors, entropies = [], []
        for rows, batch in self._forwards(observations, len(decisions), whole=self._on_cpu):
            part = self._score_tokens if self._head == "tokens" else self._score_steps
            with self.recomputing():
                log_prob, entropy = self._model.within(partial(part, batch, decisions, rows, sampling))
            factors.append(log_prob.float())
            entropies.append(entropy.float())
        count = len(decisions)
        return Score(torch.cat(factors)[:count], torch.cat(entropies)[:count])

    def imitation_loss(self, observations: Observation, target_plan_rig: NDArray[np.float32]) -> Tensor:
        """[N] loss against target plans [N,T,3]: mean cross-entropy of their tokens, or the expert's flow matching.

        The noise of flow matching is a function of the targets and of the weights, which every step changes: a run that
        is resumed draws what the unbroken one draws.

        Raises:
            ConfigError: the policy reasons first, and the targets have no words.

        """
        if self._reasons:
            raise ConfigError("must be 0 to imitate plans: they come without words", key="policy.reasoning_tokens")
        losses = []
        for rows, batch in self._forwards(observations, len(target_plan_rig), whole=self._on_cpu):
            plan = self._tensor(target_plan_rig[rows], np.float32)
            xyz = torch.cat([plan[..., :2], torch.zeros_like(plan[..., :1])], -1)
            loss = self._token_loss if self._head == "tokens" else self._flow_loss
            with self.recomputing():
                losses.append(self._model.within(partial(loss, batch, xyz, plan[..., 2])))
        return torch.cat(losses)[: len(target_plan_rig)]

    def labelled(
        self,
        observations: Observation,
        target_plan_rig: NDArray[np.float32],
        texts: Sequence[Mapping[str, str]],
        layout: PromptLayout,
    ) -> Batch:
        """N observations as whole conversations, with target plans [N,T,3] and texts in place: what SFT learns from.

        Args:
            observations: with the fields and cameras of the spec.
            target_plan_rig: x m, y m, yaw rad; all of them finite.
            texts: of each row, what the layout's order names of cot, route, …
            layout: which components there are, and which are learned.

        """
        xyz, yaw = self._history(observations)
        samples = []
        for row, (plan, words) in enumerate(zip(target_plan_rig, texts, strict=True)):
            pictures = [observations[f"camera_{name}"][row] for name in self.spec.cameras]
            images = np.stack(pictures) if pictures else np.zeros((0, self._frames, 1, 1, 3), np.uint8)
            future = np.concatenate([plan[:, :2], np.zeros_like(plan[:, :1])], axis=-1)
            samples.append(Sample(images, xyz[row], yaw[row], future, plan[:, 2], self._cameras, dict(words)))
        return self.processor.encode(samples, layout, generate=False).to(self.device)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, with `gradient_checkpointing`, a layer's activations are computed again in the backward pass.

        Layers do so in training mode only; nothing else depends on it here (no dropout).
        """
        if not (self._recompute and torch.is_grad_enabled()):
            yield
            return
        module = self.module
        module.train()
        try:
            yield
        finally:
            module.eval()

    def load(self, state: Mapping[str, Any], version: int) -> None:
        """Take new weights, all of them; what is kept of pictures and prompts is forgotten."""
        self.module.load_state_dict(state)
        self.version = version
        if self._seen is not None:
            self._seen.forget()
        if self._vllm is not None:
            self._vllm.version = None

    # ---------------------------------------------------------------- parts

    def _act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        if self._vllm is not None:
            return self._act_by_vllm(self._vllm, observations, seeds, sampling)
        count, parts = len(seeds), []
        write = self._write_tokens if self._head == "tokens" else self._denoise
        with torch.no_grad():
            for rows, batch in self._forwards(observations, count, pixels=self._seen is None):
                prefix, written = self._read(batch, observations, rows), None
                if self._reasons:
                    written = self._reason(prefix, seeds[rows], sampling)
                    ids, valid, _ = self._closed(written.ids)
                    prefix = self._model.extend(prefix, ids, valid)
                parts.append(self._decision(written, *write(batch, prefix, seeds[rows], sampling)))
        return Decision.concatenate(parts).take(np.arange(count))

    def _start_vllm(self, config: Config) -> VllmEngine:
        architecture = self._model.architecture
        return VllmEngine(
            architecture,
            self.processor,
            dtype=self._model.vlm.dtype,
            context=config.context,
            pictures=len(config.cameras) * config.frames,
            memory_share=config.vllm_memory_share,
        )

    def _act_by_vllm(
        self, engine: VllmEngine, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling
    ) -> Decision:
        """All rows at once: vLLM batches by itself."""
        if engine.version != self.version:
            engine.use(merged(self.module), self.version)
        count, pad = len(seeds), self._model.vlm.config.image_token_id
        batches = [batch for _, batch in self._forwards(observations, count, pixels=False)]
        read = torch.cat([batch.input_ids for batch in batches])[:count].tolist()
        every = np.arange(count)
        pictures, names = np.zeros((count, 0, 1, 1, 3), np.uint8), np.zeros((count, 0), np.uint64)
        if self._cameras:
            shown = (self._pictures(observations, every, name) for name in ("", "_frame_id"))
            pictures, names = (array.reshape(count, -1, *array.shape[1:]) for array in shown)
        prompts = [
            Prompt(list(one_pad_each(ids, pad)), pictures[row], [f"{name:x}" if name else None for name in names[row]])
            for row, ids in enumerate(read)
        ]
        written = None
        if self._reasons:
            stream = mix(seeds, np.uint64(TEXT_STREAM))
            written = Written(*engine.write(prompts, stream, sampling, steps=self._reasons, stop_id=self._marker))
            ids, valid, _ = self._closed(written.ids)
            prompts = [prompt.then(row[seen].tolist()) for prompt, row, seen in zip(prompts, ids, valid, strict=True)]
        first, bins = self._model.architecture.first_id, self._model.architecture.future_bins
        ids, log_prob = engine.write(prompts, seeds, sampling, steps=self._steps, bins=bins)
        history = {
            name: torch.cat([getattr(batch, name) for batch in batches])[:count]
            for name in ("history_xyz", "history_yaw")
        }
        path = self._model.decode_tokens(ids.to(self.device), replace(batches[0], **history))
        plan = torch.cat([path.xy, path.yaw[..., None]], -1)
        decision = self._decision(written, plan, log_prob, {"tokens": (ids - first).numpy()})
        if sampling.mode == "mean":
            decision.log_prob_mask[:] = False
        return decision

    def _reason(self, prefix: Prefix, seeds: NDArray[np.uint64], sampling: Sampling) -> Written:
        done = complete(
            self._engine or self._model,
            prefix,
            mix(seeds, np.uint64(TEXT_STREAM)),
            sampling,
            steps=self._reasons,
            stop_id=self._marker,
            text_only=True,
        )
        missing = (0, self._reasons - done.ids.shape[1])
        ids = nn.functional.pad(torch.where(done.mask, done.ids, -1), missing, value=-1)
        return Written(ids, nn.functional.pad(torch.where(done.mask, done.log_prob, 0.0), missing))

    def _closed(self, reasoning: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reasoning [B,R] with the marker behind it: ids [B,R+1], which are valid, and the marker's index [B]."""
        length = (reasoning >= 0).sum(-1)
        last = torch.where(reasoning.eq(self._marker).any(-1), length - 1, length)
        ids = nn.functional.pad(reasoning, (0, 1), value=-1).scatter(1, last[:, None], self._marker)
        return ids, ids >= 0, last

    def _after(self, batch: Batch, reasoning: Tensor) -> tuple[Batch, Tensor]:
        """The batch with reasoning [B,R] and the marker behind it, and the index [B] of that marker."""
        ids, valid, last = self._closed(reasoning)
        longer = replace(
            batch,
            input_ids=torch.cat([batch.input_ids, ids.clamp(min=0)], 1),
            attention_mask=torch.cat([batch.attention_mask, valid.long()], 1),
            positions=None,
        )
        return longer, batch.input_ids.shape[1] + last

    def _write_tokens(
        self, batch: Batch, prefix: Prefix, seeds: NDArray[np.uint64], sampling: Sampling
    ) -> tuple[Tensor, Tensor, dict[str, NDArray[Any]]]:
        """Plans [B,64,3], log-probabilities [B,J] of its J tokens, and trace."""
        first = self._model.architecture.first_id
        bins_of, tokens = self._model.architecture.future_bins, self._steps
        draws = torch.from_numpy(plan_draws(seeds, tokens, self._correlation)).to(self.device)
        log_probs: list[Tensor] = []

        def choose(logits: Tensor, step: int) -> Tensor:
            among = log_distribution(logits[:, first : first + bins_of], sampling, None)
            bins = among.argmax(-1) if sampling.mode == "mean" else inverse_draw(among, draws[:, step])
            log_probs.append(among.gather(-1, bins[:, None])[:, 0])
            return bins + first

        ids = (self._engine or self._model).write(prefix, choose, tokens)
        path = self._model.decode_tokens(ids, batch)
        plan = torch.cat([path.xy, path.yaw[..., None]], -1)
        return plan, torch.stack(log_probs, -1), {"tokens": (ids - first).cpu().numpy()}

    def _denoise(
        self, batch: Batch, prefix: Prefix, seeds: NDArray[np.uint64], sampling: Sampling
    ) -> tuple[Tensor, Tensor | None, dict[str, NDArray[Any]]]:
        """Plans [B,64,3], log-densities [B,J] (None where none is known) and trace."""
        chain, shape = self._chain(sampling), (len(seeds), -1, self._model.future.action_space.waypoints, 2)
        velocity = (self._engine or self._model).velocity(prefix)
        coordinates = 2 * shape[2]
        log_prob, trace = None, {}
        if sampling.mode == "mean":
            actions = euler(velocity, torch.zeros(len(seeds), shape[2], 2, device=self.device), chain.steps)
        elif chain.level == 0.0:
            noise = normal(seeds, coordinates, PLAN_STREAM).reshape(shape)[:, 0] * sampling.temperature
            actions = euler(velocity, self._tensor(noise, np.float32), chain.steps)
        else:
            noise = normal(seeds, (chain.factors + 1) * coordinates, PLAN_STREAM).reshape(shape)
            noise[:, 0] *= sampling.temperature
            x, actions, log_prob = chain.sample(velocity, self._tensor(noise, np.float32))
            trace = {"denoising": x.cpu().numpy()}
        speed = self._model.action_space.initial_speed(batch.history_xyz, batch.history_yaw)
        path = self._model.action_space.decode(actions, speed)
        return torch.cat([path.xy, path.yaw[..., None]], -1), log_prob, trace

    def _decision(
        self, written: Written | None, plan: Tensor, log_prob: Tensor | None, trace: dict[str, NDArray[Any]]
    ) -> Decision:
        plan_rig = plan.float().cpu().numpy()
        plan_rig[..., 2] = wrap_angle(plan_rig[..., 2])
        count = len(plan_rig)
        factors = np.zeros((count, self._steps), np.float32)
        if log_prob is not None:
            factors = log_prob.float().cpu().numpy()
        mask = np.full(factors.shape, log_prob is not None)
        columns: dict[str, Any] = dict(trace)
        if written is not None:
            ids = written.ids.cpu().numpy()
            factors = np.concatenate([written.log_prob.cpu().numpy(), factors], 1)
            mask = np.concatenate([ids >= 0, mask], 1)
            columns |= {"reasoning": ids, "text": self._texts(ids)}
        return Decision(plan_rig, factors, mask, np.full(count, self.version, np.int64), trace=columns)

    def _texts(self, ids: NDArray[np.int64]) -> Ragged:
        """What each row wrote, UTF-8, markers included."""
        texts = [self.processor.tokenizer.decode(row[row >= 0].tolist()).encode() for row in ids]
        offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
        return Ragged(np.frombuffer(b"".join(texts), np.uint8), offsets)

    def _score_tokens(
        self, batch: Batch, decisions: Decision, rows: NDArray[np.int64], sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        bins = self._tensor(np.asarray(decisions.trace["tokens"])[rows], np.int64)
        reasoning = self._recorded_reasoning(decisions, rows)
        text, logits = self._logits(batch, bins, reasoning)
        log_probs = log_distribution(logits, sampling, bins)
        factors = log_probs.gather(-1, bins[..., None])[..., 0]
        # exp(-inf) · -inf is NaN, also in the gradient.
        safe = torch.where(log_probs.isfinite(), log_probs, torch.zeros_like(log_probs))
        entropy = -(log_probs.exp() * safe).sum(-1).mean(-1)
        if reasoning is not None and text is not None:
            factors = torch.cat([self._text_factors(text, reasoning, sampling), factors], 1)
        return factors, entropy

    def _score_steps(
        self, batch: Batch, decisions: Decision, rows: NDArray[np.int64], sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        chain = self._chain(sampling)
        x = self._tensor(np.asarray(decisions.trace["denoising"])[rows], np.float32)
        reasoning = self._recorded_reasoning(decisions, rows)
        with nullcontext() if self._train_backbone else torch.no_grad():
            prefix, text = self._model.read(batch), None
            if reasoning is not None:
                longer, _ = self._after(batch, reasoning)
                prefix = self._model.read_up_to(longer, self._marker)
                at = batch.input_ids.shape[1] - 1
                logits = self._model.logits(self._model.hidden(longer)[:, at : at + self._reasons]).float()
                text = self._text_factors(logits, reasoning, sampling)
        factors = chain.log_prob(self._model.velocity(prefix), x)
        if text is not None:
            factors = torch.cat([text, factors], 1)
        return factors, torch.full((len(x),), chain.entropy, device=self.device)

    def _text_factors(self, logits: Tensor, reasoning: Tensor, sampling: Sampling) -> Tensor:
        """Log-probabilities [B,R] f64 of recorded reasoning, 0 behind its end."""
        barred = torch.tensor(self._model.architecture.not_text, device=logits.device)
        ids = reasoning.clamp(min=0)
        among = log_distribution(logits.index_fill(-1, barred, -torch.inf), sampling, ids)
        return torch.where(reasoning >= 0, among.gather(-1, ids[..., None])[..., 0], 0.0)

    def _logits(self, batch: Batch, bins: Tensor, reasoning: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Logits [B,R,V] of reasoning and [B,J,bins] of J tokens of a plan, each given those before; differentiable."""
        architecture = self._model.architecture
        start = batch.input_ids.shape[1] - 1
        marker = torch.full((len(bins),), start, device=bins.device)
        if reasoning is not None:
            batch, marker = self._after(batch, reasoning)
        written = bins[:, :-1] + architecture.first_id
        ids = torch.cat([batch.input_ids, written], 1)
        mask = torch.cat([batch.attention_mask, torch.ones_like(written)], 1)
        hidden = self._model.hidden(replace(batch, input_ids=ids, attention_mask=mask, positions=None))
        # The first token follows the marker, wherever the row has it; the others stand at the end.
        behind = torch.cat([marker[:, None], torch.arange(ids.shape[1] - written.shape[1], ids.shape[1],
                                                          device=bins.device).expand(len(bins), -1)], 1)  # fmt: skip
        before = hidden.gather(1, behind[..., None].expand(-1, -1, hidden.shape[-1]))
        plan = self._model.logits(
            before, slice(architecture.first_id, architecture.first_id + architecture.future_bins)
        )
        text = None if reasoning is None else self._model.logits(hidden[:, start : start + self._reasons]).float()
        return text, plan.float()

    def _recorded_reasoning(self, decisions: Decision, rows: NDArray[np.int64]) -> Tensor | None:
        return self._tensor(np.asarray(decisions.trace["reasoning"])[rows], np.int64) if self._reasons else None

    def _chain(self, sampling: Sampling) -> Chain:
        level = self._noise_level * sampling.temperature
        return Chain(self._model.denoising_steps, level, self._noise_steps, self._decided, self._noise_modes)

    @property
    def _steps(self) -> int:
        """Factors of a plan's log-probability."""
        return 2 * self._decided if self._head == "tokens" else self._chain(Sampling()).factors

    @property
    def _marker(self) -> int:
        return self._model.architecture.marker_ids["future_start"]

    def _forwards(
        self, observations: Observation, count: int, pixels: bool = True, whole: bool = True
    ) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Rows of each forward and what the model reads of them; if `whole`, the last row fills it up."""
        history, yaw = self._history(observations)
        for start in range(0, count, self._rows):
            end = start + self._rows if whole else min(start + self._rows, count)
            rows = np.minimum(np.arange(start, end), count - 1)
            values, grid = self._pixels(observations, rows, pixels)
            batch = self.processor.prompts(self.layout, history[rows], yaw[rows], self._cameras, self._frames, grid)
            # All rows have the same words at the same places; the first one's positions are everyone's.
            positions = self._model.positions(batch.first())
            batch = replace(batch, positions=positions.expand(-1, len(rows), -1), pixel_values=values)
            yield rows, batch.to(self.device)

    def _history(self, observations: Observation) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return known_history(
            observations["ego_history_rig"],
            observations["ego_history_mask"],
            observations["ego_dynamics_rig"][:, 0],
            self.spec.history_step_us * 1e-6,
        )

    def _pixels(
        self, observations: Observation, rows: NDArray[np.int64], wanted: bool
    ) -> tuple[Tensor | None, tuple[int, int, int]]:
        """Patches of the rows' pictures, if wanted, and a picture's grid."""
        if not self._cameras:
            return None, (1, 0, 0)
        if self._exact:
            size = self.processor.image_processor.patch_size
            height, width = next(iter(self.spec.cameras.values()))
            if not wanted:
                return None, (1, height // size, width // size)
            values, grid = self._patches(self._pictures(observations, rows))
        else:
            values, grid = self.processor.images(list(self._pictures(observations, rows)))  # type: ignore[assignment]
        return values, tuple(grid[0].tolist())  # type: ignore[return-value]

    def _pictures(self, observations: Observation, rows: NDArray[np.int64], name: str = "") -> NDArray[Any]:
        """Pictures [B·C·K,...] of rows in the prompt's order, or another array of the cameras (`_frame_id`)."""
        stacked = np.stack([observations[f"camera_{camera}{name}"][rows] for camera in self.spec.cameras], 1)
        return stacked.reshape(-1, *stacked.shape[3:])

    def _read(self, batch: Batch, observations: Observation, rows: NDArray[np.int64]) -> Prefix:
        """Read prompts to act on; the engine reads one that several samples are drawn from once."""
        if self._engine is None:
            return self._model.read(batch)
        words = batch.input_ids.cpu().numpy().astype(np.uint64)
        pictures = frame_ids = None
        if self._seen is not None:
            pictures, frame_ids = (self._pictures(observations, rows, name) for name in ("", "_frame_id"))
            shown = frame_ids.reshape(len(rows), -1)
            # Frames without an id are told apart by their row; all of one type, or ids are rounded.
            unknown = np.where((shown == 0).any(1), rows + 1, 0).astype(np.uint64)
            words = np.concatenate([words, shown, unknown[:, None]], 1)
        _, first, which = np.unique(words, axis=0, return_index=True, return_inverse=True)
        several = len(first) < len(rows)
        if not several:
            first = np.arange(len(rows))
        features = None
        if self._seen is not None and pictures is not None and frame_ids is not None:
            own = np.arange(len(pictures)).reshape(len(rows), -1)[first].ravel()
            features = self._seen.features(pictures[own], frame_ids[own], self.version)
        self.prompts_read += len(first)
        if not several:
            return self._engine.read(batch, features)
        prefix = self._engine.read(batch.take(torch.from_numpy(first).to(self.device)), features)
        return prefix.take(torch.from_numpy(which.ravel()).to(self.device))

    def _token_loss(self, batch: Batch, xyz: Tensor, yaw: Tensor) -> Tensor:
        bins = self._model.future.encode(batch.history_xyz, batch.history_yaw, xyz, yaw)[:, : self._steps]
        _, logits = self._logits(batch, bins, None)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), bins.flatten(), reduction="none")
        return each.unflatten(0, bins.shape).mean(-1)

    def _flow_loss(self, batch: Batch, xyz: Tensor, yaw: Tensor) -> Tensor:
        actions = self._model.action_space.encode(batch.history_xyz, batch.history_yaw, xyz, yaw)
        weight = self._model.action_out_proj.weight.detach().float().cpu().numpy()
        seed = zlib.crc32(xyz.cpu().numpy().tobytes(), zlib.crc32(weight.tobytes()))
        seeds = mix(np.arange(len(xyz)), seed)
        noise = normal(seeds, 2 * actions.shape[1], PLAN_STREAM).reshape(actions.shape)
        time = training_times(self._tensor(uniform(seeds, 1, TEXT_STREAM)[:, 0], np.float32))
        with nullcontext() if self._train_backbone else torch.no_grad():
            prefix = self._model.read(batch)
        return flow_loss(self._model.velocity(prefix), actions.float(), self._tensor(noise, np.float32), time)

    def _tensor(self, values: NDArray[Any], dtype: type) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype)).to(self.device)


def _picture_words(words: str, architecture: Architecture) -> dict[str, Any]:
    """What a prompt says before pictures, as arguments of `PromptLayout`."""
    if words == "auto":
        return {
            "camera_names": architecture.camera_names,
            "frames": "numbered" if architecture.frame_numbers else "none",
        }
    return {"camera_names": words != "none", "frames": words}


def _known(observations: Observation) -> NDArray[np.bool_]:
    """[N], True where every pose and speed that is read is finite."""
    poses = np.isfinite(observations["ego_history_rig"]).all(-1) | ~observations["ego_history_mask"]
    return np.asarray(poses.all(-1) & np.isfinite(observations["ego_dynamics_rig"]).all(-1))


def _finite(decision: Decision) -> NDArray[np.bool_]:
    """[N], True where every number that counts is finite."""
    factors = np.where(decision.log_prob_mask, decision.log_prob, 0.0)
    return np.isfinite(decision.plan_rig).all((1, 2)) & np.isfinite(factors).all(1)


def known_history(
    history_rig: NDArray[np.float32], mask: NDArray[np.bool_], speed_mps: NDArray[np.float32], step_s: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Positions [N,H,3] m and yaw [N,H] rad; poses that are not known go on straight, at the present speed.

    Args:
        history_rig: [N,H,7], position and quaternion wxyz, the last row the identity.
        mask: [N,H], True where known; the last is.
        speed_mps: [N], now.
        step_s: between poses.

    """
    count = mask.shape[1]
    w, x, y, z = (history_rig[..., 3 + k] for k in range(4))
    yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
    # What is known is an unbroken run up to now.
    known = np.logical_and.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    first = np.where(known.any(1), known.argmax(1), count - 1)[:, None]
    steps = np.maximum(first - np.arange(count), 0) * (step_s * speed_mps[:, None])
    start = np.take_along_axis(history_rig[..., :3], first[..., None], 1)
    start_yaw = np.take_along_axis(yaw, first, 1)
    back = np.stack([steps * np.cos(start_yaw), steps * np.sin(start_yaw), np.zeros_like(steps)], -1)
    xyz = np.where(known[..., None], history_rig[..., :3], start - back)
    # Whoever reads this makes table indices of it; a row with NaN fails, it must not end the process.
    poses, yaws = np.nan_to_num(xyz, posinf=0.0, neginf=0.0), np.nan_to_num(np.where(known, yaw, start_yaw))
    return poses.astype(np.float32), yaws.astype(np.float32)


def plan_draws(seeds: NDArray[np.uint64], tokens: int, correlation: float) -> NDArray[np.float64]:
    """[N,tokens] in [0, 1), each uniform; those of one coordinate (every other token) follow AR(1) in time.

    A Gaussian copula: correlated normal numbers, of which the distribution function is taken.
    """
    if correlation == 0.0:
        return uniform(seeds, tokens, PLAN_STREAM)
    noise = normal(seeds, tokens, PLAN_STREAM)
    fresh = np.sqrt(1.0 - correlation * correlation)
    for k in range(2, tokens):
        noise[:, k] = correlation * noise[:, k - 2] + fresh * noise[:, k]
    draws: NDArray[np.float64] = torch.special.ndtr(torch.from_numpy(noise)).numpy()
    return draws


def tiny_policy(config: AlpamayoTinyConfig, device: str) -> AlpamayoPolicy:
    """The tiny model with fresh weights."""
    size = TinySize(
        hidden=config.hidden,
        expert_hidden=config.hidden * 3 // 4,
        future_bins=config.future_bins,
        waypoints=config.waypoints,
        denoising_steps=config.denoising_steps,
        pixels=max(config.height * config.width, 32 * 32),
    )
    return AlpamayoPolicy(config, *make_tiny(size, seed=config.seed), device=device)


def load_policy(config: Alpamayo1Config | Alpamayo15Config, device: str) -> AlpamayoPolicy:
    """A converted checkpoint."""
    directory = Path(config.model.path)
    dtype = None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    model = load_model(directory, dtype=dtype, attention=config.model.attention)
    return AlpamayoPolicy(config, model, Processor.load(directory, model.architecture), device)
