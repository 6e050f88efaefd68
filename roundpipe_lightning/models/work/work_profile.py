"""Measures a model's work on the meta device: no weights, no accelerator, no architecture's name.

The user's code runs as it is, under a `Meter`. The blocks of the stack cut it into segments as the
engine does: what runs before the first block is the head, what runs after the last one the tail.
Blocks that are alike are measured once. A block's forward and backward passes run by themselves, on
its own inputs, so that what it keeps in between is seen as well. Gradients are added to those that
are there already.

`work_profile` runs it three times: with one sequence of s tokens, one of 2 s and two of s, from
which follow the coefficients of `Amount`. Six more runs, 16 times as long and of a few tokens, find
the memory of such sequences, where another moment may need the most. A mixture's experts run
through transformers' grouped product, whose shapes are those of the tokens that are sent to
experts, not of the experts that there are; so active experts are counted, and all experts' weights
as bytes.

`step_profile` runs the user's own step once, on a copy of the module and with the shapes of the
batch that is about to be trained on. Nothing is fitted: the figures are those of this shape, which
is all that the plan of a running training needs. The module is left as it is.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.engine.store.flat_buffers import is_mapped
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from roundpipe_lightning.models.quantized import quantizable_weights, represented_values
from roundpipe_lightning.models.work.meta_copy import MetaCopy
from roundpipe_lightning.models.work.meta_run import (
    Call,
    SegmentCost,
    kinds_of,
    measure_run,
    outside_of,
)
from roundpipe_lightning.models.work.meter import transformers_attention
from roundpipe_lightning.planning.model.profile import fingerprint
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Peak, Work, WorkProfile

_ATTENTION = "roundpipe_counted"
# What sequences are measured beside, to find the memory of short and of long ones:
_SHORT = 16  # tokens
_LONG = 16  # times as many tokens


def causal_lm_call(module: nn.Module, sequences: int, seq_len: int) -> Tensor:
    """Run a causal language model of transformers and return its mean loss.

    The loss reads the logits once and leaves their gradient in their place, as fused losses do.
    """
    tokens = torch.zeros((sequences, seq_len), dtype=torch.long, device="meta")
    logits = module(input_ids=tokens, use_cache=False).logits
    loss: Tensor = _FusedLoss.apply(logits)  # type: ignore[no-untyped-call]
    return loss


def work_profile(
    module: nn.Module,
    stack: Blocks,
    *,
    call: Call = causal_lm_call,
    seq_len: int = 2048,
    compute_dtype: torch.dtype | None = None,
    fusion: LossFusion | None = None,
    settings: Mapping[str, Any] | None = None,
    replaced: Iterable[tuple[object, object]] = (),
) -> WorkProfile:
    """Measure a module's work as a function of the microbatch's shape.

    Args:
        stack: Its blocks; of a chain, blocks that the call leaves out do nothing, and of code
            between two stacks nothing is measured. None: the whole module is the tail segment.
        seq_len: Tokens of the shorter sequences. Where attention has a window, results are best
            close to it.
        compute_dtype: As for `step_profile`, whose next three arguments are the same, too.
        settings: None: the module itself runs, not a copy.

    Raises:
        ConfigurationError: The module has parameters elsewhere, or its code needs values.
    """
    if any(p.device.type != "meta" for p in module.parameters()):
        raise ConfigurationError(
            "Work is measured without weights: build the module under torch.device('meta')."
        )
    run_module, original = module, None
    chain = run_chain = chain_of(stack)
    kinds = kinds_of(chain.links)
    if settings is not None:
        firsts: dict[int, nn.Module] = {}
        pairs = zip(kinds, chain.links, strict=True)
        copy = MetaCopy(
            module,
            compute_dtype=compute_dtype,
            settings=settings,
            replaced=replaced,
            alike={link.block: firsts.setdefault(kind, link.block) for kind, link in pairs},
        )
        run_module, original = copy.module, copy.original
        run_chain = _copied(chain, copy)
    run = call if fusion is None else _fused(call, fusion, run_chain)

    def three_runs(seq_len: int) -> list[tuple[list[SegmentCost], set[nn.Module]]]:
        shapes = ((1, seq_len), (1, 2 * seq_len), (2, seq_len))
        return [
            measure_run(run_module, run_chain, run, *shape, kinds=kinds, outside=outside)
            for shape in shapes
        ]

    fused = True
    with _gradients(run_module):
        outside = outside_of(run_module, run_chain)
        try:
            with _attention(run_module):
                runs = three_runs(seq_len)
        except ConfigurationError:
            # Some models' code handles its masks itself and cannot do without them: they are
            # measured with the attention that their configuration names.
            fused = False
            runs = three_runs(seq_len)
        fits = [_Fit(runs=[costs for costs, _ in runs], seq_len=seq_len)]
        for other in (_LONG * seq_len, _SHORT):
            with (
                contextlib.suppress(ConfigurationError),  # the model takes no such sequences
                _attention(run_module) if fused else contextlib.nullcontext(),
            ):
                short, long, double = (costs for costs, _ in three_runs(other))
                long = double if other == _SHORT else long  # too few tokens to read squares off
                fits.append(_Fit(runs=[short, long, double], seq_len=other))
    head_modules = runs[0][1]
    if original is not None:
        head_modules = set(map(original, head_modules))
    return _with_boundaries_of(
        _profile(module, chain, fits, head_modules=head_modules), module, compute_dtype
    )


def step_profile(
    module: nn.Module,
    stack: BlockStack | None,
    *,
    microbatch: Any,
    call: Callable[[Any, Any], Any],
    compute_dtype: torch.dtype | None = None,
    fusion: LossFusion | None = None,
    settings: Mapping[str, Any] | None = None,
    replaced: Iterable[tuple[object, object]] = (),
) -> WorkProfile:
    """Measure the step of one microbatch without running it on values.

    Args:
        microbatch: What the step is called with; only the shapes of its tensors are used.
        call: Runs the step on a copy of the module and of the microbatch, on the meta device.
        compute_dtype: What autocast computes in; None: what the parameters are.
        fusion: Computes losses without whole logits, as the engine will; None: nothing does.
        settings: As of `MetaCopy`, and `replaced`, too.

    Raises:
        ConfigurationError: The step needs values, has no loss, or would change what is no part of
            the module.
        Exception: Whatever the user's code raised.
    """
    copy = MetaCopy(module, compute_dtype=compute_dtype, settings=settings, replaced=replaced)
    chain = chain_of(stack)
    meta_chain = _copied(chain, copy)

    def on_meta(tensor: Tensor) -> Tensor:
        dtype = compute_dtype if tensor.is_floating_point() and compute_dtype else tensor.dtype
        return torch.empty_like(tensor, dtype=dtype, device="meta")

    def run_step(root: nn.Module, _sequences: int, _seq_len: int) -> Any:
        return call(root, map_tensors(on_meta, microbatch))

    step: Call = run_step if fusion is None else _fused(run_step, fusion, meta_chain)

    def loss_of_step(*given: Any) -> Tensor:
        loss = loss_of(step(*given))
        if loss is None or not loss.requires_grad:
            raise ConfigurationError("The step returned no loss to train on.")
        return loss

    with _gradients(copy.module), alone():
        kinds, outside = kinds_of(meta_chain.links), outside_of(copy.module, meta_chain)
        costs, in_head = measure_run(
            copy.module, meta_chain, loss_of_step, 1, 1, kinds=kinds, outside=outside
        )
    if copy.reason_not_copied is not None:  # and the user's code went on without it
        raise ConfigurationError(f"Something could not be copied: {copy.reason_not_copied}.")
    head_modules = {copy.original(child) for child in in_head}
    work = _profile(module, chain, [_Fit(runs=[costs])], head_modules=head_modules)
    return _with_boundaries_of(work, module, compute_dtype)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Runs to read amounts off: one, or those of one sequence, a twice as long one, and of two."""

    runs: Sequence[Sequence[SegmentCost]]
    seq_len: int | None = None

    def amount(self, index: int, value: Callable[[SegmentCost], float]) -> Amount:
        values = [value(costs[index]) for costs in self.runs]
        if self.seq_len is None:
            return Amount(fixed=float(values[0]))
        short, long, double = values
        return Amount.fit(short, long, double, seq_len=self.seq_len)


def _copied(chain: Chain, copy: MetaCopy) -> Chain:
    links = (replace(link, block=copy.module_copy(link.block)) for link in chain.links)
    return replace(chain, links=tuple(links))


def _profile(
    module: nn.Module, chain: Chain, fits: Sequence[_Fit], *, head_modules: set[nn.Module]
) -> WorkProfile:
    """Put what ran together with the module's parameters; peaks are the larger ones of all fits."""
    owners = [list(link.block.modules()) for link in chain.links]
    inside = {inner for modules in owners for inner in modules}
    rest = [child for child in module.modules() if child not in inside]
    in_head = head_modules if chain.links else set()
    head, tail = ([m for m in rest if (m in in_head) == wanted] for wanted in (True, False))
    sizes = _sizes(module)

    def work(name: str, index: int, modules: Sequence[nn.Module]) -> BlockWork:
        return _segment_work(name, index, owned_tensors(modules), fits, sizes)

    return _assembled(module, chain, [head, *owners, tail], work, sizes)


def _assembled(
    module: nn.Module,
    chain: Chain,
    segments: Sequence[Sequence[nn.Module]],
    work: Callable[[str, int, Sequence[nn.Module]], BlockWork],
    sizes: Sizes,
) -> WorkProfile:
    """Put the works of the head, every block and the tail together, which have these modules."""
    names = ["head segment", *chain.names, "tail segment"]
    works = [work(names[i], i, modules) for i, modules in enumerate(segments)]
    tied = owned_tensors(segments[0]) & owned_tensors(segments[-1])
    repeated: Counter[str] = Counter()
    seen: set[Tensor] = set()
    for modules in segments[1:-1]:
        frozen = {tensor for tensor in owned_tensors(modules) if not tensor.requires_grad}
        repeated.update(sizes(frozen & seen, trained=frozenset()))
        seen |= frozen
    return WorkProfile(
        head=works[0],
        blocks=tuple(works[1:-1]),
        tail=works[-1],
        tied_parameters=sizes(tied, trained=frozenset())["num_parameters"],
        repeated=BlockWork(name="repeated", **dict[str, Any](repeated)),
        fingerprint=module_fingerprint(module, chain),
        cuts=chain.cuts,
    )


def _segment_work(
    name: str, index: int, tensors: set[Tensor], fits: Sequence[_Fit], sizes: Sizes
) -> BlockWork:
    def amount(path: str, fit: _Fit = fits[0]) -> Amount:
        return fit.amount(index, attrgetter(path))

    def peak(path: str) -> Peak:
        return Peak(
            amounts=tuple(amount(path, fit) for fit in fits if fit.seq_len != _SHORT),
            short=next((amount(path, fit) for fit in fits if fit.seq_len == _SHORT), Amount()),
        )

    def work(passed: str) -> Work:
        return Work(**{each.name: amount(f"{passed}.{each.name}") for each in fields(Work)})

    return BlockWork(
        name=name,
        forward=work("forward"),
        backward=work("backward"),
        **sizes(tensors, trained={t for t in tensors if t.requires_grad}),
        boundary_bytes=amount("boundary_bytes"),
        gradient_bytes=amount("gradient_bytes"),
        kept_bytes=amount("kept_bytes"),
        attention_bytes=amount("forward.attention_bytes"),
        forward_peak_bytes=peak("forward_peak_bytes"),
        peak_bytes=peak("peak_bytes"),
    )


def _with_boundaries_of(
    work: WorkProfile, module: nn.Module, compute_dtype: torch.dtype | None
) -> WorkProfile:
    """Give boundaries the parameters' width: autocast leaves what flows between blocks wide.

    It makes narrow what linear layers give: adapters on a narrow base widen nothing.
    """
    if compute_dtype is None:
        return work
    others = [child for child in module.modules() if not isinstance(child, nn.Linear)]
    parameters = [p for child in others for p in child.parameters(recurse=False)]
    parameters = parameters or list(module.parameters())
    widest = max((p.itemsize for p in parameters if p.is_floating_point()), default=0)
    factor = max(1.0, widest / compute_dtype.itemsize)
    blocks = (replace(each, boundary_bytes=each.boundary_bytes * factor) for each in work.blocks)
    return replace(work, blocks=tuple(blocks))


class _FusedLoss(torch.autograd.Function):
    """A loss that reads the logits once, and turns them into their gradient where they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits.flatten(), dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        changed: Tensor = logits.detach().mul_(gradient)
        return changed


def _fused(call: Call, fusion: LossFusion, chain: Chain) -> Call:
    """A call whose losses are computed without whole logits, as the engine does outside blocks."""
    for link in chain.links:
        link.block.__dict__["forward"] = fusion.paused()(link.block.forward)

    def fused(*given: Any) -> Any:
        with fusion.active():
            return fusion.materialized(call(*given))

    return fused


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep a run quiet and on the meta device."""
    with (
        torch.device("meta"),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # it would find gradients that are not a number
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _gradients(module: nn.Module) -> Iterator[None]:
    """Give parameters gradients to add to, as every microbatch but the first one has."""
    trained = [p for p in module.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient


@contextlib.contextmanager
def _attention(module: nn.Module) -> Iterator[None]:
    """Make transformers' models call fused attention, by the name they look it up with.

    But for eager ones, which keep their scores: those asked for so, and gpt-oss by default.
    """
    configs = {
        id(config): config
        for child in module.modules()
        if (config := getattr(child, "config", None)) is not None
        and getattr(config, "_attn_implementation", "eager") != "eager"
    }
    if not configs:
        yield
        return
    from transformers import AttentionInterface

    before = {key: config._attn_implementation for key, config in configs.items()}  # noqa: SLF001
    AttentionInterface.register(_ATTENTION, transformers_attention)
    try:
        for config in configs.values():
            config._attn_implementation = _ATTENTION  # noqa: SLF001
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]  # noqa: SLF001


Blocks: TypeAlias = BlockStack | Chain | None
"""The blocks of a model: those of one stack that is called once, or the calls of a step.

None: the whole module is the tail segment, which the fused stage runs.
"""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def parameter_work(module: nn.Module, stack: Blocks) -> WorkProfile:
    """Estimate a module's work from its parameters, where its code cannot be asked.

    Per token and parameter there are two operations forward, as many backward for the gradient of
    the input, and as many again for the gradient of the parameter if it gets one. Tables that are
    looked up (`nn.Embedding`) cost nothing; of the experts of a mixture only as many count as a
    token meets, where a `config` of the model says how many. Attention scores are left out: they
    depend on the length of the sequences. Modules registered before the first block belong to the
    head segment, others outside of the blocks to the tail segment. A call of a chain that needs no
    gradient has no backward.

    Bytes are those of the parameters and buffers as they are; of activations and boundaries nothing
    is known, so they are 0. The figures are those of one token, or of a sample that is one row.
    """
    shares, sizes = _expert_shares(module), _sizes(module)
    head, tail = _segments(module, stack)
    chain = chain_of(stack)
    ends = len(chain.links) + 1

    def work(name: str, index: int, owners: Sequence[nn.Module]) -> BlockWork:
        has_backward = index in (0, ends) or chain.links[index - 1].backward
        uses = [  # a tied one once per module that has it
            (p, _operations(owner, p, shares))
            for owner in owners
            for p in owner._parameters.values()  # noqa: SLF001
            if p is not None
        ]
        every_token = sum(count for _, count in uses)
        trained = sum(count for p, count in uses if p.requires_grad)
        trainable = {p for p, _ in uses if p.requires_grad and has_backward}
        backward = every_token + trained if has_backward else 0
        return BlockWork(
            name=name,
            forward=Work(matrix_operations=Amount(fixed=float(every_token))),
            backward=Work(matrix_operations=Amount(fixed=float(backward))),
            **sizes(owned_tensors(owners), trained=trainable),
        )

    blocks = [list(link.block.modules()) for link in chain.links]
    return _assembled(module, chain, [head, *blocks, tail], work, sizes)


def module_fingerprint(module: nn.Module, stack: Blocks) -> str:
    """Return a digest of a module's structure, by which a plan for another model is refused.

    It covers the blocks' names and all parameters' names and shapes, so tied parameters, which have
    one name, differ from untied ones. Values, dtypes, devices and what is trained do not matter.
    """
    blocks = [f"block {name}" for name in chain_of(stack).names]
    shapes = (f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())
    return fingerprint([*blocks, *shapes])


def chain_of(stack: Blocks) -> Chain:
    """Return the calls of a step; those of a stack are one after the other, each once."""
    if isinstance(stack, Chain):
        return stack
    return Chain.from_stacks(() if stack is None else (stack,))


def _segments(module: nn.Module, stack: Blocks) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules outside of the blocks: before the first one, and after it."""
    chain = chain_of(stack)
    blocks = {link.block for link in chain.links}
    inside = {inner for block in (*blocks, *chain.others) for inner in block.modules()}
    head: list[nn.Module] = []
    tail: list[nn.Module] = []
    segment = head if blocks else tail
    for child in module.modules():
        if child in blocks:
            segment = tail
        elif child not in inside:
            segment.append(child)
    return head, tail


def owned_tensors(owners: Iterable[nn.Module]) -> set[Tensor]:
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in owners]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


Sizes: TypeAlias = Callable[..., dict[str, Any]]
"""Gives the numbers and bytes of tensors of which some are `trained`, by names of `BlockWork`."""


def _sizes(module: nn.Module) -> Sizes:
    packed = {getattr(layer, name) for layer, name in quantizable_weights(module)}
    represented = represented_values(module)

    def count(some: Iterable[Tensor]) -> int:
        parameters = (tensor for tensor in some if isinstance(tensor, nn.Parameter))
        return sum(represented.get(tensor, tensor.numel()) for tensor in parameters)

    def sizes(tensors: Set[Tensor], *, trained: Set[Tensor]) -> dict[str, Any]:
        return {
            "num_parameters": count(tensors),
            "num_trainable": sum(tensor.numel() for tensor in trained),
            "parameter_bytes": sum(tensor.nbytes for tensor in tensors),
            "trainable_bytes": sum(tensor.nbytes for tensor in trained),
            "mapped_bytes": sum(tensor.nbytes for tensor in tensors if is_mapped(tensor)),
            "num_quantizable": count(tensors & packed),
            "quantizable_bytes": sum(tensor.nbytes for tensor in tensors & packed),
        }

    return sizes


def _operations(owner: nn.Module, parameter: nn.Parameter, shares: dict[int, float]) -> float:
    """Operations that one token costs forward."""
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return 0.0
    share = shares.get(parameter.shape[0], 1.0) if parameter.dim() >= 3 else 1.0
    return 2.0 * parameter.numel() * share


def _expert_shares(module: nn.Module) -> dict[int, float]:
    """Per number of experts the share of them that a token meets, from the configurations."""
    shares: dict[int, float] = {}
    for child in module.modules():
        config = getattr(child, "config", None)
        active = getattr(config, "num_experts_per_tok", None)
        for name in _EXPERT_COUNTS:
            count = getattr(config, name, None)
            if isinstance(active, int) and isinstance(count, int) and 0 < active <= count:
                shares[count] = active / count
    return shares
