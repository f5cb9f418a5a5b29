"""`get` and `put`: elements of arrays of which the compiler knows that they do not overlap.

A loop that looks something up in a table and stores the result is not vectorized unless the compiler knows that the
store cannot change the table, and numba cannot tell it. These two say it, by name: what is read and written under
different names lies apart. Indices are not checked and do not count from the end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

NAMES = (
    "table", "depth", "seen", "colour", "back", "total", "norm", "cell", "inner", "grain", "shade", "out",
    "plane", "blue", "red", "one", "other", "coded", "some", "sums", "fine",
)  # fmt: skip
"""Inputs are all "table"; each of the others is one array of a kernel's working memory, or the picture."""


def _mark(builder: Any, instruction: Any, name: str) -> None:
    """LLVM's metadata for scoped aliases."""
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "alpagym")])
    scopes = {other: module.add_metadata([ir.MetaDataString(module, other), domain]) for other in NAMES}
    instruction.set_metadata("alias.scope", module.add_metadata([scopes.pop(name)]))
    instruction.set_metadata("noalias", module.add_metadata(list(scopes.values())))


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]], inbounds=True)


@intrinsic(prefer_literal=True)
def get(typing: Any, array: Any, index: Any, name: Any) -> Any:
    """The element of a one-dimensional contiguous array."""
    if not isinstance(name, types.StringLiteral):
        return None

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_place(context, builder, signature, arguments))
        _mark(builder, value, name.literal_value)
        return value

    return array.dtype(array, index, name), code


@intrinsic(prefer_literal=True)
def put(typing: Any, array: Any, index: Any, value: Any, name: Any) -> Any:
    """Store an element of a one-dimensional contiguous array."""
    if not isinstance(name, types.StringLiteral):
        return None

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        cast = context.cast(builder, arguments[2], signature.args[2], signature.args[0].dtype)
        _mark(builder, builder.store(cast, _place(context, builder, signature, arguments)), name.literal_value)
        return context.get_dummy_value()

    return types.void(array, index, value, name), code
