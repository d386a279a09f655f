"""Chat templates: what models' templates use works, what escapes or runs away is stopped."""

import contextlib
import re
import time

import pytest

from nanoflow_jax.tokenizer import ChatTemplate, ChatTemplateError, chat_template

MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "<b>two</b>"}]


def render(source, messages=MESSAGES, **variables):
    return ChatTemplate(source).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m['role'] }}:{{ m.content }};{% endfor %}", "user:one;assistant:<b>two</b>;"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% endfor %}",
         "0TrueFalse2 1FalseTrue2 "),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% else %}none{% endfor %}", "1"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }} {% endfor %}", "role=user content=one "),
        ("{% for m in messages | reverse %}{{ loop.revindex }}{% endfor %}{{ messages[1:] | length }}", "211"),
        ("{% for m in messages recursive %}{{ m.role }}{% endfor %}", "userassistant"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[0]['content'] + 'x' ~ 1 ~ none }}", "onex1None"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "one"}, {"role": "assistant", "content": "<b>two</b>"}]'),
        ("{{ {'a': 'é<>&'} | tojson(indent=1) }}", '{\n "a": "é<>&"\n}'),
        ("{{ messages[1].content.split('two')[0].strip() | upper }}{{ 'a,b'.replace(',', '') }}", "<B>ab"),
        ("{{ messages | map(attribute='role') | join('+') }}{{ messages[0].role | trim | default('x', true) }}",
         "user+assistantuser"),
        ("{% macro show(m) %}[{{ m.role }}]{% endmacro %}{{ show(messages[0]) }}", "[user]"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "<b>two</b>"),
        ("{% if tools is defined and tools %}t{% endif %}{{ undefined_name }}", ""),
        ("{{ 7 // 2 }}{{ 2 ** 5 }}{{ '%s!' % 'a' }}", "332a!"),
        ("{{ '%5.2f|%-3s|%d%%' % (1.5, 'a', 20240101) }}{{ '{:>3}{}'.format(1, 'b') }}{{ '%s-%s' | format(1, 2) }}",
         " 1.50|a  |20240101%  1b1-2"),
        ("{% set parts %}a{% endset %}{{ parts ~ 'b' }}{% filter upper %}c{% endfilter %}", "abC"),
    ],
)  # fmt: skip
def test_what_templates_use_works(source, expected):
    assert render(source, tools=None) == expected


def test_the_date_is_the_templates_business():
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


def test_a_template_can_refuse_its_messages():
    with pytest.raises(ChatTemplateError, match="refuses the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("messages", [["hello"], [{"content": "x"}], [{"role": 3}], [None]])
def test_messages_need_roles(messages):
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] must be an object with a role"):
        render("x", messages)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a b }}", "{% endif %}", "{% include %}", "{{ '" + "(" * 5000])
def test_what_is_no_template_does_not_compile(source):
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include 'x' %}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_nothing_leaves_the_sandbox(source):
    messages = [dict(message) for message in MESSAGES]
    with contextlib.suppress(ChatTemplateError):
        assert render(source, messages) == ""
    assert messages == MESSAGES


RUNAWAYS = {
    "nested loops": "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "exponential macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling with +": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling with %": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubling lists as JSON":
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "huge repetition": "{{ 'x' * 10 ** 12 }}",
    "huge power": "{{ 10 ** 10 ** 10 }}",
    "huge list": "{{ [1] * 10 ** 12 }}",
    "huge padding": "{{ 'x'.center(10 ** 12) }}",
    "huge zero fill": "{{ '1'.zfill(10 ** 12) }}",
    "huge filter": "{{ 'x' | center(10 ** 12) }}",
    "huge indent": "{{ 'x\ny' | indent(10 ** 12) }}",
    "huge width": "{{ '%1000000000000d' % 1 }}",
    "huge width of a filter": "{{ '%1000000000000d' | format(1) }}",
    "huge width of a method": "{{ '{:1000000000000}'.format(1) }}",
    "huge width from the arguments": "{{ '%*d' % (999999999, 1) }}",
    "huge width from a method's arguments": "{{ '{:{}}'.format(1, 99999999) }}",
    "huge replacement": "{% set x = 'x' * 9999999 %}{{ x.replace('x', x) }}",
    "huge join": "{% set x = 'x' * 9999999 %}{{ ([x] * 99999) | join }}",
}  # fmt: skip


@pytest.mark.parametrize("case", RUNAWAYS)
def test_runaway_templates_are_stopped(case, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError):
        render(RUNAWAYS[case])
    # Not a matter of speed: unstopped, each of these takes longer than anyone waits, or more memory than there is.
    assert time.monotonic() - started < 60


def test_long_chats_are_no_runaways():
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    text = render("{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' }}{% endfor %}", messages)
    assert len(text) > 1_000_000
