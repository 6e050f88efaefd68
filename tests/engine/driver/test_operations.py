"""Operations that keep rows apart: run on parts of a batch, they give the parts of the result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from roundpipe_lightning.engine.driver.forms import Rows, TensorForm
from roundpipe_lightning.engine.driver.operations import RowOperation, row_operation

METADATA = {"shape", "dtype", "device", "ndim", "size", "dim", "__len__", "numel", "requires_grad"}


class Lazy(Tensor):
    """Stands for a lazy tensor: operations on it are run on parts, which are compared."""

    rows: Rows | None
    num_rows: int
    batch: Tensor
    part_rows: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor, rows: Rows | None, part_rows: tuple[int, ...]) -> "Lazy":
        lazy: Lazy = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device
        )
        lazy.batch, lazy.rows = values, rows
        lazy.part_rows, lazy.num_rows = part_rows, sum(part_rows)
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        operation = row_operation(func, args, kwargs, is_lazy=is_lazy)
        if operation is None:
            raise MixesRowsError(name)
        return compared(operation, func, args, kwargs)

    __torch_dispatch__: Any = classmethod(lambda *_: pytest.fail("An operation had no values."))


class MixesRowsError(Exception):
    """An operation is none that keeps rows apart."""


def is_lazy(tensor: Any) -> bool:
    return isinstance(tensor, Lazy)


def real(tree: Any) -> Any:
    return tree_map(lambda x: x.batch if isinstance(x, Lazy) else x, tree)


def cut(tensor: Tensor, rows: Rows | None, part_rows: tuple[int, ...]) -> list[Tensor]:
    if rows is None:
        return [tensor] * len(part_rows)
    return list(tensor.split([n * rows.repeat for n in part_rows], rows.dim))


def compared(operation: RowOperation, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the parts of a batch, and return lazy tensors of its results."""
    leaves, structure = tree_flatten((args, kwargs))
    part_rows = next(x.part_rows for x in leaves if isinstance(x, Lazy))
    assert len(operation.form.arguments) == len(leaves)
    cuts = []
    for leaf, rows in zip(leaves, operation.form.arguments, strict=True):
        assert not isinstance(leaf, Lazy) or rows == leaf.rows
        assert rows is None or not isinstance(leaf, nn.Parameter)
        values = leaf.batch if isinstance(leaf, Lazy) else leaf
        cuts.append(
            cut(values, rows, part_rows) if isinstance(leaf, Tensor) else [leaf] * len(part_rows)
        )
    whole, result_structure = tree_flatten(func(*real(args), **real(kwargs)))
    assert result_structure == operation.form.structure
    parts = []
    for part in zip(*cuts, strict=True):
        part_args, part_kwargs = tree_unflatten(list(part), structure)
        results, part_structure = tree_flatten(operation.function(*part_args, **part_kwargs))
        assert part_structure == result_structure
        parts.append(results)
    lazies = []
    for form, values, *results in zip(operation.form.results, whole, *parts, strict=True):
        assert isinstance(form, TensorForm)
        assert form.rows is not None
        assert (form.shape_for(sum(part_rows)), form.dtype) == (values.shape, values.dtype)
        for num_rows, result in zip(part_rows, results, strict=True):
            assert (form.shape_for(num_rows), form.dtype) == (result.shape, result.dtype)
        tolerance = 1e-6 if values.dtype.itemsize >= 4 else 1e-2
        torch.testing.assert_close(
            torch.cat(results, form.rows.dim),
            values,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )
        lazies.append(Lazy.of(values, form.rows, part_rows))
    return tree_unflatten(lazies, result_structure)


def operands(part_rows: tuple[int, ...]) -> dict[str, Any]:
    """Return what the calls below name: B rows, T tokens, C channels, H heads of D."""
    torch.manual_seed(0)
    B, T, C, H, D, V = sum(part_rows), 4, 6, 2, 3, 11  # noqa: N806 - as in shapes

    def lazy(*shape: int, dim: int = 0, repeat: int = 1) -> Lazy:
        return Lazy.of(torch.rand(shape) + 0.1, Rows(dim, repeat), part_rows)

    def integers(*shape: int) -> Lazy:
        return Lazy.of(torch.randint(0, V, shape), Rows(0), part_rows)

    return {
        "torch": torch, "F": functional, "nn": nn,
        "B": B, "T": T, "C": C, "H": H, "D": D, "V": V,
        "x": lazy(B, T, C), "y": lazy(B, T, C), "tokens": lazy(B, T), "row": lazy(B, C),
        "scores": lazy(B), "second": lazy(T, B, C, dim=1), "last": lazy(C, B, dim=1),
        "flat": lazy(B * T, C, repeat=T), "heads": lazy(B, H, T, D), "images": lazy(B, C, 8, 8),
        "keys": lazy(B, H, T, D), "one": lazy(B, 1, C),
        "ids": integers(B, T), "mask": Lazy.of(torch.rand(B, T) > 0.5, Rows(0), part_rows),
        "shared_lazy": Lazy.of(torch.rand(T, C), None, part_rows),
        "rows_lazy": Lazy.of(torch.rand(B, T, C), None, part_rows),
        "real": torch.rand(B, T, C), "real_row": torch.rand(B, C), "real_one": torch.rand(B, 1, 1),
        "positions": torch.rand(T, C), "single": torch.rand(1, T, C), "number": torch.tensor(2.0),
        "causal": torch.rand(T, T) > 0.3, "real_second": torch.rand(T, B, C),
        "real_flat": torch.rand(B * T, C), "real_ids": torch.randint(0, C, (B, T, 2)),
        "weight": nn.Parameter(torch.rand(5, C)), "bias": nn.Parameter(torch.rand(5)),
        "square": torch.rand(C, C), "vector": torch.rand(C), "scale": nn.Parameter(torch.rand(C)),
        "table": nn.Parameter(torch.rand(V, 5)), "row_parameter": nn.Parameter(torch.rand(B, T, C)),
        "batched": torch.rand(B, C, 5), "experts": torch.rand(T, C, 5),
        "kernel": nn.Parameter(torch.rand(5, C, 3)), "kernel2d": torch.rand(5, C, 3, 3),
        "index": torch.tensor([2, 0, 3]), "columns": torch.tensor([1, 1, 0, 5, 2, 3, 4]),
    }  # fmt: skip


PARTS = [(3, 2, 2), (2, 1, 1), (2, 3)]


def run(call: str, part_rows: tuple[int, ...]) -> Any:
    return eval(call, operands(part_rows))


ELEMENTWISE = """
x + y | x + 1 | 1 + x | x - y | 2.5 - x | x * 2 | 2 * x | x / y | 1 / x | x // 0.3 | 2 // x
x % 0.3 | 2 % x | x ** 2 | 2 ** x | -x | +x | abs(x) | x == y | x != 1 | x < y | x <= y | x > 0.5
x >= real | ~mask | mask & mask | mask ^ mask | ids ^ 1 | x + real | real + x | real - x
x + positions | positions * x | x * single | x * number | number * x | x + real_one
real_row + row | row[:, None] + x | real_row[:, None] * x | x + shared_lazy | x * scale
scale * row | row + scale | second + real_second | real_second * second | second + real_row
row + second | flat + real_flat | flat * scale | torch.add(x, y, alpha=2) | torch.sub(x, y)
torch.mul(x, y) | torch.div(x, y, rounding_mode="floor") | torch.maximum(x, y)
torch.minimum(x, real) | torch.max(x, y) | x.min(y) | torch.where(x > y, x, y)
torch.where(mask[..., None], x, 0.0) | torch.where(mask[..., None], real, 0.0)
torch.where(real > 0.5, x, y) | x.where(x > y, number) | x.masked_fill(mask[..., None], 0.0)
x.masked_fill(real > 0.5, float("-inf")) | heads.masked_fill(mask[:, None, :, None], 0)
x.clamp(0.2, 0.5) | x.clamp(min=0.3) | torch.clamp(x, max=y) | x.clip(0, 1) | x.nan_to_num()
torch.lerp(x, y, 0.3) | torch.addcmul(x, x, y, value=2) | torch.addcdiv(x, x, y) | x.pow(3)
torch.atan2(x, y) | x.rsqrt() | x.sqrt() | x.exp() | x.log() | x.log1p() | x.expm1() | x.erf()
x.sin() | x.cos() | x.tanh() | x.sigmoid() | x.abs() | x.square() | x.reciprocal() | x.sign()
torch.special.expit(x) | torch.special.erf(x) | torch.logaddexp(x, y) | torch.isnan(x) | x.floor()
F.relu(x) | F.gelu(x) | F.gelu(x, approximate="tanh") | F.silu(x) | F.softplus(x) | F.elu(x)
F.leaky_relu(x, 0.1) | F.mish(x) | F.logsigmoid(x) | F.hardtanh(x) | F.relu6(x) | F.celu(x)
F.hardswish(x) | F.hardsigmoid(x) | F.selu(x) | F.softsign(x) | F.tanhshrink(x)
F.threshold(x, 0.2, 0) | F.sigmoid(x) | F.tanh(x) | nn.GELU()(x) | nn.SiLU()(x) | nn.ReLU()(x)
F.prelu(x, number[None]) | x.float() | x.half() | x.bfloat16() | x.double() | x.long()
mask.float() | mask.int() | ids.bool() | x.to(torch.float16) | x.to(dtype=torch.float64)
x.to("cpu") | x.to(torch.device("cpu"), torch.half) | x.to(real.half()) | x.to(ids)
x.type_as(real) | x.type_as(ids) | x.type(torch.float64) | x.to(torch.float32, copy=True)
x.to(device="cpu", dtype=torch.half, non_blocking=True) | x.clone() | x.contiguous()
x.transpose(1, 2).contiguous() | x.detach() | torch.zeros_like(x)
torch.ones_like(x, dtype=torch.bool) | torch.full_like(x, 2.0) | x.expand_as(y)
torch.broadcast_tensors(x, real_one) | x.repeat(1, 2, 1) | x.repeat(2, 1, 1, 1) | x.tile(2)
F.mse_loss(x, y, reduction="none") | F.l1_loss(x, real, reduction="none")
F.binary_cross_entropy_with_logits(x, real, reduction="none") | F.pad(x, (1, 2))
F.pad(x, (0, 0, 1, 0)) | F.pad(second, (1, 0, 0, 0, 1, 1)) | F.one_hot(ids, V)
"""
REDUCTIONS = """
F.layer_norm(x, (C,)) | F.layer_norm(x, (T, C)) | F.layer_norm(x, (C,), scale, scale, 1e-6)
nn.LayerNorm(C)(x) | nn.LayerNorm(C)(second) | nn.RMSNorm(C)(x) | F.rms_norm(x, (C,), scale)
F.layer_norm(flat, (C,)) | F.layer_norm(x, [C], vector) | F.group_norm(images, 3)
nn.GroupNorm(2, C)(images) | F.normalize(x, dim=-1) | F.normalize(x, dim=2) | F.normalize(x)
x / x.norm(dim=-1, keepdim=True) | x.mean(-1) | x.mean(dim=1) | x.mean((1, 2))
x.mean(-1, keepdim=True) | x.mean([1], True) | second.mean(0) | second.mean((0, 2))
second.sum(0, keepdim=True) | x.sum(2) | x.sum(axis=1) | torch.sum(x, (1, -1))
x.pow(2).mean(-1, keepdim=True) | x.amax(1) | x.amin((1, 2)) | x.max(1)
x.max(dim=-1, keepdim=True) | x.min(2) | torch.max(x, 1) | torch.max(x, 1)[0] | x.var(-1)
x.var(1, unbiased=False) | x.std(1) | x.var(dim=1, correction=0) | torch.var_mean(x, -1)
x.norm(dim=-1) | x.norm(2, -1) | torch.norm(x, dim=1) | torch.linalg.norm(x, dim=-1)
torch.linalg.vector_norm(x, dim=(1, 2)) | x.prod(1) | mask.any(1) | mask.all(-1) | x.argmax(-1)
x.argmin(1) | x.softmax(-1) | F.softmax(x, dim=1) | torch.softmax(second, 0)
F.softmax(x, -1, dtype=torch.float64) | x.log_softmax(-1) | F.log_softmax(x, dim=-1)
x.logsumexp(-1) | torch.logsumexp(x, (1, 2)) | x.cumsum(1) | x.cumprod(-1) | mask.cumsum(1)
x.topk(2) | x.topk(2, dim=1) | torch.topk(x, 3, -1) | x.sort(-1) | x.sort(dim=1, descending=True)
x.argsort(1) | x.median(1) | x.kthvalue(2, 1) | x.cummax(1) | x.flip(1) | x.flip(1, 2)
torch.flip(x, (1, -1)) | x.roll(1, 2) | x.roll(shifts=(1, 1), dims=(1, 2)) | x.diff(dim=1)
F.glu(x) | F.cosine_similarity(x, y, dim=-1) | F.cosine_similarity(x, real)
x.gather(2, ids[..., None].clamp(max=5)) | torch.gather(x, -1, real_ids)
real.gather(2, ids[..., None].clamp(max=5)).squeeze(-1) | x.take_along_dim(real_ids, 2)
x.log_softmax(-1).gather(-1, ids.clamp(max=5).unsqueeze(2)).squeeze(2) | x.index_select(1, index)
last.index_select(0, columns) | x.repeat_interleave(2, dim=1) | torch.count_nonzero(x, 1)
torch.cat([x, y], -1) | torch.cat((x, y, x), dim=1) | torch.cat([real, x], 1)
torch.cat([x, real_one.expand(B, 1, C)], 1) | torch.cat([second, real_second], 0)
torch.concat([flat, flat], 1) | torch.stack([x, y]) | torch.stack([x, y], 1)
torch.stack([x, real], -1) | torch.stack([second, second], 1) | torch.stack([row, row], dim=2)
"""
VIEWS = """
x.view(B, -1) | x.view(B, T * C) | x.view(B, T, 2, 3) | x.view(B, T, -1, 3) | x.view((B, -1))
x.view(-1, C) | x.view(B * T, C) | x.view(B * T, -1) | x.view(x.shape[0], -1) | x.view(x.size())
x.view(-1) | x.reshape(B, -1) | x.reshape(-1, T * C) | x.reshape(B * T, C)
torch.reshape(x, (B, 2, -1)) | x.flatten() | x.view(1, B, -1) | x.view(B, 1, T, 1, C)
x.view(1, 1, B * T, C) | x.view(-1, 2, C) | x.view(B * 2, -1) | x.flatten(0, 1) | x.flatten(1)
x.flatten(1, 2) | torch.flatten(x, 1) | x.flatten(start_dim=0, end_dim=-1) | flat.view(B, T, -1)
flat.view(B, T, C) | flat.reshape(-1, T, C) | flat.unflatten(0, (B, T)) | flat.view(B, -1)
flat.unflatten(0, (-1, T)) | flat.view(B * 2, 2, C) | flat.view(B, 2, 2, C)
flat.unflatten(1, (2, 3)) | flat.view(-1, 2 * C) | x.flatten(0, 1).unflatten(0, (B, T))
x.unflatten(-1, (2, 3)) | tokens.view(-1) | second.view(T, B * C) | second.view(T, B, 2, 3)
second.reshape(T, -1) | second.reshape(T, B, -1) | second.view(2, 2, B, C) | second.flatten(1)
second.flatten(1, 2).view(T, B, C) | second.unflatten(0, (2, -1))
second.transpose(0, 1).reshape(B * T, C) | second.transpose(0, 1).flatten(1)
second.view(T, B * 2, H * D // 2) | heads.transpose(1, 2).reshape(B, T, -1)
x.view(B, T, H, D).transpose(1, 2) | heads.view(B * H, T, D)
heads.view(B * H, T, D).view(B, H, T, D) | heads.permute(0, 2, 1, 3).flatten(2) | one.squeeze()
one.squeeze(1) | x.squeeze() | x.squeeze(0) | x.unsqueeze(1) | x.unsqueeze(0) | x.unsqueeze(-1)
x.unsqueeze(1).squeeze(1) | torch.unsqueeze(row, 1) | one.expand(B, T, C) | one.expand(-1, T, -1)
one.expand(one.shape[0], 5, C) | x.expand(2, B, T, C) | one.expand(2, -1, 3, -1)
second.unsqueeze(1).expand(T, 2, B, C) | x.transpose(0, 1) | x.transpose(1, 2)
torch.transpose(second, 0, 1) | x.swapaxes(0, 2) | x.permute(1, 0, 2) | x.permute((2, 0, 1))
x.permute(0, 2, 1) | x.movedim(1, 2) | x.movedim(0, -1) | x.mT | row.T | last.T | row.t() | x.mH
x.chunk(2, -1) | x.chunk(3, dim=2) | torch.chunk(x, 2, 1) | x.split(2, dim=1) | x.split([1, 3], 1)
torch.split(x, 3, -1) | x.tensor_split(2, dim=1) | x.unbind(1) | x.unbind(-1) | second.unbind(0)
torch.unbind(second) | x.narrow(1, 1, 2) | x.select(1, 2) | second.select(0, -1)
x.diagonal(dim1=1, dim2=2) | x.unfold(1, 2, 1) | x[:, 0] | x[:, -1] | x[:, 1:3] | x[..., 0]
x[..., :-1, :] | x[:] | x[...] | x[:, ::2] | x[:, None] | x[None] | x[:, 0, :2]
x[:, :, None, 1:] | second[0] | second[-1] | second[1:3] | second[..., 1] | second[0, :, 1:]
x[0:B] | x[:B, 1] | flat[:, 2:] | x[:, index] | x[:, :, columns] | x[..., index] | second[index]
x[:, [0, 2]] | x[:, index[:, None]] | x[:, :, [1, 1], None] | last[columns]
second[[0, 1], :, 2:]
"""
PRODUCTS = """
F.linear(x, weight) | F.linear(x, weight, bias) | F.linear(second, weight)
F.linear(flat, weight) | F.linear(row, weight) | nn.Linear(C, 3)(x) | F.linear(x, square, vector)
x @ square | x @ weight.T | torch.matmul(x, square) | second @ square | x @ vector | row @ vector
row @ square | flat @ square | x.matmul(square) | square @ x.mT | square @ last | vector @ last
square @ row.T | torch.mm(row, square) | torch.mv(row, vector) | x @ y.mT | x @ real.mT
real @ x.mT | heads @ keys.transpose(-1, -2) | torch.bmm(x, y.transpose(1, 2)) | x.bmm(batched)
x @ batched | torch.matmul(heads.softmax(-1), positions[:, :3].T) | second @ experts
row[:, None] @ batched | vector @ batched.mul(x[:, :1, :1]) | x[:, None] @ square
heads.view(B * H, T, D) @ keys.view(B * H, T, D).mT | torch.addmm(vector, row, square)
torch.addmm(real_row, row, square) | torch.baddbmm(x.mean((1, 2), True), x, y.mT)
torch.baddbmm(real_one, x, batched, beta=2) | torch.baddbmm(number, x, y.mT)
F.embedding(ids, table) | nn.Embedding(V, 3)(ids) | F.embedding(ids, table, padding_idx=0)
F.conv1d(x.mT, kernel) | F.conv2d(images, kernel2d) | nn.Conv1d(C, 4, 3, padding=1)(x.mT)
F.max_pool2d(images, 2) | F.avg_pool1d(x.mT, 2) | F.adaptive_avg_pool2d(images, 1)
F.pixel_shuffle(images[:, :4], 2) | torch.matmul(x, other=square) | torch.mm(row, mat2=square)
F.scaled_dot_product_attention(heads, keys, keys) | heads.tril() | torch.cdist(x, y)
F.scaled_dot_product_attention(heads, heads, keys, attn_mask=mask[:, None, None])
F.scaled_dot_product_attention(x, y, real, causal) | heads.mul(2).triu(1)
F.scaled_dot_product_attention(heads, keys, keys, is_causal=True)
torch.einsum("btc,cd->btd", x, square) | torch.einsum("bhtd,bhsd->bhts", heads, keys)
torch.einsum("btc, bsc -> bts", x, real) | torch.einsum("tbc,cd->dbt", second, square)
torch.einsum("btc->bt", x) | torch.einsum("bc,c->b", row, vector)
"""
MIXING = """
x.sum() | x.mean() | x.max() | x.mean(0) | x.sum((0, 1)) | x.mean(()) | x.sum(dim=None) | x.std()
x.var(True) | x.softmax(0) | F.softmax(second, 1) | x.log_softmax(-3) | x.cumsum(0) | x.sort(0)
scores.sort() | scores.topk(2) | scores.softmax(-1) | scores.argmax() | x.argmax() | x.norm()
x.norm(dim=0) | x.logsumexp((0, 1)) | x.amax() | x.flip(0) | x.flip(1, 0) | x.roll(1)
x.roll(1, 0) | x.any() | x.all(0) | x.prod() | x.median() | x.unbind() | x.diff(dim=0)
F.normalize(x, dim=0) | F.cosine_similarity(row, row, dim=0) | F.glu(x.flatten(0, 1)[:, 0], 0)
F.layer_norm(x, (B, T, C)) | F.layer_norm(scores, (B,)) | F.layer_norm(last, (B,))
F.rms_norm(scores, (B,)) | F.batch_norm(row, None, None, training=True) | nn.BatchNorm1d(C)(row)
F.group_norm(second, 1) | F.dropout(x) | F.dropout(x, 0.2) | nn.Dropout()(x) | torch.rand_like(x)
x.bernoulli() | torch.randn_like(x) | F.gumbel_softmax(x, dim=-1) | F.alpha_dropout(x, 0.5, True)
F.rrelu(x, training=True) | x.add_(1) | x.mul_(2) | x.__iadd__(1) | x.__setitem__(0, 1)
x.relu_() | x.masked_fill_(mask[..., None], 0) | x.copy_(y) | x.zero_() | x.fill_(1) | x.clamp_(0)
torch.add(x, y, out=real) | torch.sum(x, 1, out=real) | F.relu(x, inplace=True)
F.silu(x, inplace=True) | F.normalize(x, dim=-1, out=real) | x.requires_grad_()
second.view(T * B, C) | second.flatten() | second.flatten(0, 1) | second.reshape(-1, C)
second.reshape(T * B * C) | second.view(2, -1, C) | x.transpose(0, 1).reshape(-1, C)
x.mT.transpose(0, 1).flatten(0, 1) | last.view(-1) | last.flatten()
x.permute(2, 0, 1).reshape(-1, T) | heads.transpose(0, 1).reshape(-1, T, D)
x.transpose(0, 1).flatten(0, 1) | x.view(torch.int32) | x[0] | x[-1] | x[1:] | x[:-1] | x[::2]
x[mask] | x[index % 2] | x[[0, 1]] | x[0, :, 1] | x[:, mask[0]] | second[:, 0] | second[:, 1:]
x[:, index, [0, 1, 2]] | x[torch.arange(B), 0] | x[torch.arange(B), index[0]] | flat[0] | flat[1:]
x[:, index, 0] | x[True] | x[tokens > 0.5] | second[mask.T] | positions[ids.clamp(max=3)]
x[:, ids] | x.narrow(0, 0, 2) | x.narrow(0, 0, B) | x.select(0, 0) | x.chunk(2) | x.split(1)
x.split(2) | x.tensor_split(2) | x.unbind(0) | x.unfold(0, 2, 1) | x.diagonal()
x.diagonal(dim1=0, dim2=2) | x.repeat(2, 1, 1) | x.tile(2, 1, 1) | x.expand(B, T, C + 1)
x.repeat_interleave(2) | x.repeat_interleave(2, dim=0) | x.index_select(0, index % 2)
x.as_strided((B, T), (1, 1)) | torch.cat([x, y]) | torch.cat([second, second], 1)
torch.cat([x, row_parameter], 1) | torch.cat([flat, flat])
torch.cat([x, single.expand(1, T, C)], 1) | torch.cat([x, second], 2) | torch.stack([x, second])
x + second | x + row | x * row_parameter | x + rows_lazy | flat + x.view(-1) | row + scores
row_parameter + x | x + flat | row * last | x - real_second.transpose(0, 2) | row @ row.T
row.T @ row | last @ row | x @ last.mT[:, :, None].mT | torch.matmul(row.T, real_row)
row @ real_row.T @ row | real_row.T @ row | scores @ row | scores @ scores | last @ real_row
x.transpose(0, 2) @ row | F.linear(last, torch.rand(2, B)) | F.linear(positions, x[0])
F.linear(positions, row) | F.linear(x, weight, scores) | second @ x | x.mT @ row_parameter
torch.addmm(row, row.T, row) | torch.bmm(second, second.mT).sum(1)
torch.einsum("btc,bsc->ts", x, y) | torch.einsum("btc,bsc", x, y)
torch.einsum("...c,cd->...d", x, square) | torch.einsum("bc,dc->bd", row, row)
torch.einsum("bc,dc->bd", row, row_parameter[0]).T @ row
torch.einsum("btc,btc->c", x, row_parameter) | torch.einsum("btc,btc->bt", x, row_parameter)
F.scaled_dot_product_attention(row, row, row)
F.scaled_dot_product_attention(heads, keys, keys, dropout_p=0.1)
F.scaled_dot_product_attention(second, second, second) | F.embedding(ids, table, max_norm=0.0)
F.embedding(ids, table, max_norm=1.0) | F.embedding(ids, table, scale_grad_by_freq=True)
F.embedding(ids, table, sparse=True) | F.embedding(real_ids, x[0]) | F.one_hot(ids)
F.cross_entropy(row, ids[:, 0]) | F.mse_loss(x, y) | F.l1_loss(x, y, reduction="sum")
F.pad(x, (0, 0, 0, 0, 1, 0)) | F.pad(x, (0, 0, 0, 0, 1, -1)) | F.conv1d(row.T, kernel[:, :B])
torch.where(mask) | mask.nonzero() | x.item() | x.tolist() | x.unique()
x.masked_select(mask[..., None]) | torch.histc(x) | torch.bincount(ids.flatten())
torch.equal(x, y) | torch.allclose(x, y) | x.data | x.to("meta") | x.to(0)
torch.zeros_like(x, device="cpu") | x.type() | x.new_zeros(3) | x.gather(0, real_ids)
x.gather(1, real_ids[:1]) | x.scatter(2, real_ids, 1.0) | torch.cdist(row, row) | row.cov()
second.tril() | row.tril() | x.T | x.index_fill(1, index, 0)
"""


def calls(table: str) -> list[str]:
    return [call for line in table.strip().splitlines() for call in line.split(" | ")]


ROW_WISE = [call for table in (ELEMENTWISE, REDUCTIONS, VIEWS, PRODUCTS) for call in calls(table)]


@pytest.mark.parametrize("part_rows", PARTS, ids=str)
@pytest.mark.parametrize("call", ROW_WISE)
def test_row_operations_give_the_parts_of_their_results(
    call: str, part_rows: tuple[int, ...]
) -> None:
    assert all(isinstance(x, Lazy) for x in tree_flatten(run(call, part_rows))[0])


@pytest.mark.parametrize("part_rows", PARTS[:2], ids=str)
@pytest.mark.parametrize("call", calls(MIXING))
def test_other_operations_are_none(call: str, part_rows: tuple[int, ...]) -> None:
    with pytest.raises(MixesRowsError):
        run(call, part_rows)


def test_the_tables_are_long() -> None:
    assert len(ROW_WISE) >= 150
    assert len(calls(MIXING)) >= 60


@pytest.mark.parametrize("call", calls(PRODUCTS) + calls(REDUCTIONS)[:20])
def test_autocast_tells_the_dtypes_of_results(call: str) -> None:
    dtypes = [leaf.dtype for leaf in tree_flatten(run(call, (3, 2, 2)))[0]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(call, (3, 2, 2))
    assert [leaf.dtype for leaf in tree_flatten(run(call, (3, 2, 2)))[0]] == dtypes


def test_a_projection_under_autocast_has_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run("F.linear(x, weight)", (3, 2, 2)).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert run("F.linear(x, weight)", (3, 2, 2)).dtype is torch.float32


@pytest.mark.parametrize("call", ROW_WISE)
def test_a_batch_of_one_row_is_its_only_part(call: str) -> None:
    """Dimensions of one entry all may be the rows': any is right, none gathers."""
    try:
        run(call, (1,))
    except (MixesRowsError, IndexError, RuntimeError):
        pytest.skip("The call needs more rows.")


def operation_of(call: Callable[[Any], Any], **changes: Any) -> RowOperation | None:
    """Return the operation of a call of `x`, which is made once."""
    operations: list[RowOperation | None] = []

    class Recorder(Lazy):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            operations.append(row_operation(func, args, kwargs or {}, is_lazy=is_lazy))

    values = changes.pop("values", torch.rand(4, 3, 6))
    call(Recorder.of(values, changes.pop("rows", Rows(0)), changes.pop("part_rows", (2, 2))))
    return operations[0]


CACHED: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda x: x * 2.0, lambda x: x * 3.5),
    (lambda x: x.view(4, -1), lambda x: x.view(4, -1)),
    (lambda x: x[:, 1:], lambda x: x[:, 1:]),
    (lambda x: x + torch.ones(3, 1), lambda x: x + torch.zeros(3, 1)),
    (lambda x: x.mT, lambda x: x.mT),
]


@pytest.mark.parametrize(("call", "alike"), CACHED)
def test_equal_calls_have_one_operation(
    call: Callable[[Any], Any], alike: Callable[[Any], Any]
) -> None:
    assert operation_of(call) is not None
    assert operation_of(call) is operation_of(alike)


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x.sum(1, True), lambda x: x.sum(1, False)),
        (lambda x: x[:, 0], lambda x: x[:, False:]),
        (lambda x: x + torch.ones(4, 3, 1), lambda x: x + torch.ones(1, 3, 1)),
    ],
)
def test_other_calls_have_others(call: Callable[[Any], Any], other: Callable[[Any], Any]) -> None:
    assert operation_of(call) is not operation_of(other)
    assert operation_of(lambda x: x + 1) is not operation_of(lambda x: x + 1, rows=Rows(1))
    assert operation_of(lambda x: x + 1) is not operation_of(
        lambda x: x + 1, rows=Rows(0, 2), part_rows=(1, 1)
    )


@pytest.mark.parametrize(
    ("without", "random"),
    [
        ("F.dropout(x, 0.0)", "F.dropout(x, 0.3)"),
        ("F.dropout(x, 0.3, False)", "F.dropout(x, 0.3, True)"),
        ("nn.Dropout(0.0)(x)", "nn.Dropout(0.5)(x)"),
        (
            "F.scaled_dot_product_attention(heads, keys, keys, dropout_p=0.0)",
            "F.scaled_dot_product_attention(heads, keys, keys, dropout_p=0.1)",
        ),
    ],
)
def test_dropout_of_nothing_is_no_other_dropout(without: str, random: str) -> None:
    for _ in range(2):
        run(without, (3, 2, 2))
        with pytest.raises(MixesRowsError):
            run(random, (3, 2, 2))


def test_autocast_of_other_devices_needs_none_of_them() -> None:
    x: Any = Tensor._make_wrapper_subclass(Lazy, (4, 3, 6), device=torch.device("cuda:0"))
    x.rows, x.num_rows = Rows(0), 4
    weight = nn.Parameter(torch.rand(5, 6))
    dtypes = {}
    for is_enabled in (False, True):
        torch.set_autocast_enabled("cuda", is_enabled)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            operation = row_operation(functional.linear, (x, weight), {}, is_lazy=is_lazy)
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert operation is not None
        dtypes[is_enabled] = operation.form.results[0].dtype
    assert dtypes == {False: torch.float32, True: torch.bfloat16}


def test_integers_and_floats_give_their_dtypes() -> None:
    integers = torch.zeros(4, 2, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (True, torch.int64), (1.0, torch.float32)):
        operation = operation_of(lambda x: x * number, values=integers)  # noqa: B023 - called here
        assert operation is not None
        assert operation.form.results[0].dtype is dtype


def test_arguments_without_hash_are_no_trouble() -> None:
    class Order:
        __hash__ = None  # type: ignore[assignment]

    assert operation_of(lambda x: x.norm(Order(), 0)) is None


def test_forms_are_derived_without_random_numbers() -> None:
    state = torch.get_rng_state()
    run("F.linear(x.sin().cos().view(B, -1), torch.ones(13, T * C))", (5, 1))
    torch.manual_seed(0)
    operands((5, 1))
    expected = torch.get_rng_state()
    run("F.linear(x.tan().cos().view(B, -1), torch.ones(14, T * C))", (5, 1))
    assert torch.equal(torch.get_rng_state(), expected)
    torch.set_rng_state(state)


def test_operations_have_names() -> None:
    names = {"layer_norm": lambda x: functional.layer_norm(x, (6,)), "mT": lambda x: x.mT}
    for name, call in names.items():
        operation = operation_of(call)
        assert operation is not None
        assert operation.name == name


def test_gradients_pass_all_but_constants() -> None:
    def is_differentiable(call: Callable[[Any], Any]) -> bool:
        operation = operation_of(call)
        assert operation is not None
        return operation.is_differentiable

    assert is_differentiable(lambda x: x * 2)
    assert not is_differentiable(lambda x: x.detach())
    assert not is_differentiable(torch.zeros_like)


def test_lazy_tensors_of_other_batches_do_not_meet() -> None:
    x = Lazy.of(torch.rand(4, 6), Rows(0), (2, 2))
    other = Lazy.of(torch.rand(4, 6), Rows(0, repeat=2), (1, 1))
    assert row_operation(torch.Tensor.add, (x, other), {}, is_lazy=is_lazy) is None


def test_parts_may_have_other_strides_than_the_batch() -> None:
    operation = operation_of(lambda x: x.view(4, -1))
    assert operation is not None
    part = torch.rand(6, 3, 2).permute(2, 1, 0)
    assert torch.equal(operation.function(part, 4, -1), part.reshape(2, -1))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_views_follow_the_rows(data: st.DataObject) -> None:
    """Views keep rows apart exactly where a dimension of the result counts the rows."""
    num_rows, repeat = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([1, 1, 2, 4]))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = num_rows * repeat
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    numbers = torch.arange(num_rows).repeat_interleave(repeat)
    numbers = numbers.view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
    lazy = Lazy.of(values, Rows(dim, repeat), (1, num_rows - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        call = data.draw(views(list(lazy.shape)))
        numbers = call(numbers)
        place = place_of(numbers, num_rows)
        if place is None:
            with pytest.raises(MixesRowsError):
                call(lazy)
            return
        lazy = call(lazy)
        assert lazy.rows == place


def place_of(numbers: Tensor, num_rows: int) -> Rows | None:
    """Return where a tensor of the numbers of rows has the rows."""
    for dim, size in enumerate(numbers.shape):
        last = numbers.movedim(dim, -1)
        expected = torch.arange(num_rows).repeat_interleave(max(size // num_rows, 1))
        if len(expected) == size and torch.equal(last, expected.expand_as(last)):
            return Rows(dim, size // num_rows)
    return None


@st.composite
def views(draw: st.DrawFn, shape: list[int]) -> Callable[[Any], Any]:
    """Return a view of a tensor of a shape."""
    dims = st.integers(0, len(shape) - 1)
    kind = draw(st.sampled_from("transpose permute reshape unsqueeze squeeze flatten".split()))
    if kind == "transpose":
        first, second = draw(dims), draw(dims)
        return lambda x: x.transpose(first, second)
    if kind == "permute":
        order = draw(st.permutations(range(len(shape))))
        return lambda x: x.permute(order)
    if kind == "unsqueeze":
        place = draw(st.integers(0, len(shape)))
        return lambda x: x.unsqueeze(place)
    if kind == "squeeze":
        place = draw(dims)
        return lambda x: x.squeeze(place)
    if kind == "flatten":
        start, end = sorted((draw(dims), draw(dims)))
        return lambda x: x.flatten(start, end)
    num_entries, sizes = torch.Size(shape).numel(), []
    while num_entries > 1:
        sizes.append(
            draw(st.sampled_from([n for n in range(2, num_entries + 1) if num_entries % n == 0]))
        )
        num_entries //= sizes[-1]
    sizes = sizes or [1]
    sizes[draw(st.integers(0, len(sizes) - 1))] = -1
    return lambda x: x.reshape(sizes)
