"""When an output agrees with the reference's: evalplus 0.3.1's rules, on plain values.

Written after `evalplus.eval.unsafe_execute` (Apache-2.0), with these differences, each of which is stricter or mends
a fault: HumanEval/32 is counted (evalplus skips it, so that it can never pass); a float output's tolerance holds for
that output and not for all that come after it; the tasks for which evalplus takes anything (Mbpp/164) are compared.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    Rule: TypeAlias = Callable[[Any, Any, Sequence[Any], float], bool]

__all__ = ["RULES", "agree", "close", "same"]

FLOAT_TOLERANCE = 1e-6
RELATIVE_TOLERANCE = 1e-7


def agree(
    candidate: Callable[..., Any], expected: Sequence[Any], inputs: Sequence[Sequence[Any]], atol: float, rule: str
) -> None:
    """Ask the candidate for every input, and stop at the first on which it is not as the reference.

    Args:
        candidate: what is tested.
        expected: the reference's output for each input.
        inputs: the arguments of each call.
        atol: absolute tolerance of floats; 0 for the default.
        rule: the task, as in `RULES`.

    Raises:
        AssertionError: naming the input by its place; never by its value or the expected one.
    """
    accepts = RULES.get(rule, same)
    for place, (arguments, wanted) in enumerate(zip(inputs, expected, strict=True)):
        if not accepts(candidate(*arguments), wanted, arguments, atol):
            raise AssertionError(f"input {place} of {len(inputs)}")


def same(output: Any, expected: Any, _arguments: Sequence[Any], atol: float) -> bool:
    """Equal, or floats within the task's tolerance (1e-6 if the task states none) and of one type."""
    if output == expected:
        return True
    if atol == 0 and is_floats(expected):
        atol = FLOAT_TOLERANCE
    return atol != 0 and type(output) is type(expected) and close(output, expected, atol)


def is_floats(value: Any) -> bool:
    """A float, or a list or tuple of nothing but floats, not empty."""
    if isinstance(value, float):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, float) for item in value)


def close(output: Any, expected: Any, atol: float) -> bool:
    """numpy's allclose with rtol 1e-7, over lists and tuples of one shape; NaN is close to nothing."""
    if isinstance(expected, list | tuple):
        same_length = isinstance(output, list | tuple) and len(output) == len(expected)
        return same_length and all(close(one, other, atol) for one, other in zip(output, expected, strict=True))
    numbers = int | float | complex
    if not (isinstance(output, numbers) and isinstance(expected, numbers)):
        return False
    if output == expected:  # two infinities are
        return True
    distance = abs(output - expected)
    return distance <= atol + RELATIVE_TOLERANCE * abs(expected) < float("inf")


def _as_sets(output: Any, expected: Any, _arguments: Sequence[Any], _atol: float) -> bool:
    return set(output) == set(expected)


def _is_there(output: Any, expected: Any, _arguments: Sequence[Any], _atol: float) -> bool:
    """A match object cannot be compared: that there is one is what counts."""
    there = expected if isinstance(expected, bool) else expected is not None
    return bool((output if isinstance(output, bool) else output is not None) == there)


def _is_zero(output: Any, _expected: Any, arguments: Sequence[Any], atol: float) -> bool:
    """HumanEval/32: any root of the polynomial is right."""
    (coefficients,) = arguments
    return bool(abs(sum(factor * output**power for power, factor in enumerate(coefficients))) <= atol)


def _or(other: Callable[..., Any], *, exactly: bool = True) -> Rule:
    """Equal to the reference, or to what another reading of the task gives."""

    def accepts(output: Any, expected: Any, arguments: Sequence[Any], atol: float) -> bool:
        if output == expected or same(output, expected, arguments, atol):
            return True
        second = other(*arguments)
        return bool(output == second) if exactly else abs(output - second) <= atol

    return accepts


def _surface_area(base: float, height: float) -> int:
    """Mbpp/581 with the perpendicular height for the slanted one."""
    slanted = ((base / 2) ** 2 + height**2) ** 0.5
    total: int = round(base**2 + 4 * (base * slanted) / 2)
    return total


def _digit_distance(one: int, other: int) -> int:
    """Mbpp/558 with the shorter number padded by zeros."""
    first, second = str(one), str(other)
    width = max(len(first), len(second))
    return sum(abs(int(a) - int(b)) for a, b in zip(first.zfill(width), second.zfill(width), strict=True))


_SETS = (
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly"),
    *("larg_nnum", "intersection_array", "find_dissimilar", "Diff"),
)
RULES: dict[str, Rule] = {
    "HumanEval/find_zero": _is_zero,
    **{f"Mbpp/{name}": _as_sets for name in _SETS},
    **{f"Mbpp/{name}": _is_there for name in ("check_str", "text_match_three", "text_starta_endb")},
    "Mbpp/sum_div": _or(lambda *_: 0),
    "Mbpp/surface_Area": _or(_surface_area, exactly=False),
    "Mbpp/digit_distance_nums": _or(_digit_distance),
}
"""Tasks that are not compared by `same`, as dataset/entry point."""
