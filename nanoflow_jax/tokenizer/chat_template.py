"""Chat templates: jinja2 programs that come with a model, run in a sandbox on a budget.

The sandbox keeps a template from the interpreter's internals. It does not keep it from running for ever or from making huge
texts, so every loop step, call and concatenation is charged to a budget of steps, seconds and characters, which the compiled
template cannot avoid: loops and `~` are rewritten to charge, calls, operators and filters are intercepted by the environment.
"""

import contextvars
import dataclasses
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_CHARS = 16 << 20
# The same list can be part of a value again and again, so that a small value has endless parts.
_MAX_PARTS = 1 << 18


class ChatTemplateError(ValueError):
    """A chat template that does not compile, refuses its messages, fails on them, or exceeds its budget."""


class ChatTemplate:
    """A compiled template; safe to share between threads."""

    def __init__(self, source: str):
        """Raises ChatTemplateError: `source` is not a template."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of the chat.

        Raises:
          ChatTemplateError: a message has no role, or the template refuses the messages, fails, or exceeds its budget.
        """
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ChatTemplateError(f"messages[{i}] must be an object with a role, not {message!r:.100}")
        budget = _Budget(deadline_s=time.monotonic() + MAX_SECONDS)
        token = _budget.set(budget)
        try:
            return "".join(map(budget.charge_text, self._template.generate(messages=messages, **variables)))
        except ChatTemplateError:
            raise
        except RecursionError as error:
            raise ChatTemplateError("chat template recurses too deeply") from error
        except Exception as error:  # a template can raise anything that Python can
            raise ChatTemplateError(f"chat template failed: {type(error).__name__}: {error}") from error
        finally:
            _budget.reset(token)


@dataclasses.dataclass
class _Budget:
    """What one rendering may still use."""

    deadline_s: float
    steps: int = MAX_STEPS
    chars: int = MAX_CHARS

    def charge_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise ChatTemplateError(f"chat template took more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline_s:
            raise ChatTemplateError(f"chat template ran longer than {MAX_SECONDS} s")

    def charge_chars(self, count: int) -> None:
        self.chars -= count
        if self.chars < 0:
            raise ChatTemplateError(f"chat template makes more than {MAX_CHARS} characters")

    def charge_text(self, text: str) -> str:
        self.charge_chars(len(text))
        return text


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("chat_template_budget")


def _charge_step() -> None:
    # None while compiling: jinja folds constant filters then, whose sizes are limited all the same.
    budget = _budget.get(None)
    if budget is not None:
        budget.charge_step()


def _size(value: Any) -> int:
    """Characters that `value` would have as text, from below; more than MAX_CHARS for what has too many parts to count."""
    total, parts, stack = 0, 0, [value]
    while stack and total <= MAX_CHARS:
        part = stack.pop()
        parts += 1
        if parts > _MAX_PARTS:
            return MAX_CHARS + 1
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, Mapping):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            total += len(part)
            stack += part
        else:
            total += 1
    return total


def _charge_product(*values: Any) -> None:
    """Charges a step and refuses an operation whose result can exceed the limit: no text operation gives more than the
    product of its operands' sizes, a number counting as the width or count that it may be."""
    _charge_step()
    product = 1
    for value in values:
        size = abs(value) if isinstance(value, int) else _size(value)
        product *= max(1, size)
        if product > MAX_CHARS * 8 or (size > MAX_CHARS and not isinstance(value, int)):
            raise ChatTemplateError("chat template makes a value that is too large")


# A width or precision of six digits or more, or one that is taken from the arguments.
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}]*(\d{6}|\{)")


def _check_format(form: Any) -> None:
    if isinstance(form, str) and _WIDE_FORMAT.search(form):
        raise ChatTemplateError("chat template formats a value too widely")


def _metered_loop(iterable: Iterable) -> Iterator:
    for item in iterable:
        _charge_step()
        yield item


def _metered_join(parts: list[Any]) -> str:
    texts = [str(part) for part in parts if _size(part) <= MAX_CHARS]
    if len(texts) < len(parts) or sum(map(len, texts)) > MAX_CHARS:
        raise ChatTemplateError("chat template makes a value that is too large")
    _charge_step()
    return "".join(texts)


def _metered_filter(function: Callable) -> Callable:
    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        _charge_product(*args, *kwargs.values())
        return function(*args, **kwargs)

    return metered


class _Rewrite(NodeTransformer):
    """Sends every loop's iterable and every `~` through a metered filter."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        if not node.recursive:  # a recursive loop calls itself, and calls are metered
            node.iter = nodes.Filter(node.iter, "_metered_loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_metered_join", [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewrite().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise ChatTemplateError("chat template makes a value that is too large")
        if operator == "+":
            _charge_step()
            if _size(left) + _size(right) > MAX_CHARS:
                raise ChatTemplateError("chat template makes a value that is too large")
        else:
            _charge_product(left, right)
        if operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__)
            _charge_product(value.__self__, *args, *kwargs.values())
            return formatted(*args, **kwargs)

        return metered

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _charge_product(owner, *args, *kwargs.values())
        else:
            _charge_step()
        return super().call(context, obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here it is its body."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _finalize(value: Any) -> Any:
    if not isinstance(value, str) and _size(value) > MAX_CHARS:
        raise ChatTemplateError("chat template makes a value that is too large")
    return value


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"chat template refuses the messages: {message}")


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return jinja2.filters.do_format(value, *args, **kwargs)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        finalize=_finalize,
    )
    environment.filters |= {"tojson": _tojson, "format": _format}
    environment.filters = {name: _metered_filter(function) for name, function in environment.filters.items()}
    environment.filters |= {"_metered_loop": _metered_loop, "_metered_join": _metered_join}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment
