"""Chat templates that would compute without end are refused or fail at once; honest ones are as they were."""

import json
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from service.errors import TemplateRefused
from service.plan.rendering import ChatTemplate

FREEZE_S = 60
MESSAGES = [{"role": "user", "content": "One & two"}, {"role": "assistant", "content": "Three."}]

POWERS = {
    "a power": "{{ 9**(9**(9**9)) }}",
    "a power in a condition": "{% if 9**(9**(9**9)) %}x{% endif %}",
    "a power of a variable": "{% set n = 9 %}{{ n**(n**(n**n)) }}",
}
ENDLESS = {
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated text of a variable": "{% set n = 10000000000 %}{{ ('a' * n)|length }}",
    "repeated list": "{{ ([1] * 10000000000)|length }}",
    "repeated list of a long number": "{{ ([" + "9" * 400 + "] * 2)|length }}",
    "list repeated from the left": "{{ (10000000000 * [messages])|length }}",
    "range": "{{ range(1000000000000)|list }}",
    "random text": "{{ lipsum(1000000000) }}",
    "printf": "{{ '%10000000000d' % 1 }}",
    "printf with a width that is a value": "{{ '%*d' % (10000000000, 1) }}",
    "printf by name": "{{ ('%(a)s' * 9999) % {'a': 'x' * 9999999} }}",
    "printf filter": "{{ '%.10000000000f'|format(1.0) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format with a width that is a value": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format of a mapping": "{{ '{a:>10000000000}'.format_map({'a': 'x'}) }}",
    "center": "{{ 'x'|center(10000000000) }}",
    "center by map": "{{ ['x']|map('center', 10000000000)|list }}",
    "indent": "{{ 'x\\ny'|indent(10000000000, true) }}",
    "batch": "{{ [1]|batch(10000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000000)|list }}",
    "round": "{{ 1.5|round(999999999, 'floor') }}",
    "tojson": "{{ [1]|tojson(indent=10000000000) }}",
    "wordwrap": "{{ ('a ' * 9999)|wordwrap(1, wrapstring='b' * 9999999) }}",
    "replace": "{{ ('a' * 9999999)|replace('a', 'b' * 9999999) }}",
    "join": "{{ ('a' * 999999)|join('b' * 9999999) }}",
    "join of an iterator": "{{ range(99999)|map('string')|join('b' * 9999999) }}",
    "sum": "{% set x = ['ab'] %}{{ x|sum(start=x) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "rjust": "{{ 'x'.rjust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big')|length }}",
    "replace of text": "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
    "join of text": "{{ ('b' * 9999999).join('a' * 9999999) }}",
    "translate": "{{ ('a' * 9999999).translate({97: 'b' * 9999999}) }}",
    "text doubled": "{% set x = 'a' %}" + "{% set x = x ~ x %}" * 40,
    "text added": "{% set x = 'a' %}" + "{% set x = x + x %}" * 40,
    "text in a block": "{% set x = 'a' * 9999999 %}{% set y %}" + "{{ x }}" * 9999 + "{% endset %}",
    "text in a macro": "{% macro f(x) %}"
    + "{{ x }}" * 9
    + "{% endmacro %}{{ "
    + "f(" * 12
    + "'a'"
    + ")" * 12
    + "}}",
    "numbers multiplied": "{% set x = 99999999 %}" + "{% set x = x * x %}" * 60,
    "a list of lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "a list of lists without a name": "{% set x = [1] %}"
    + "{% set x = (x + x)|batch(2)|list %}" * 60
    + "{{ x }}",
    "a mapping of mappings": "{% set x = 1 %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x|tojson }}",
    "a list added to itself": "{% set x = ['a' * 9999999] %}" + "{% set x = x + x %}" * 20 + "{{ x }}",
}
PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
from service.plan.rendering import ChatTemplate, RenderFailed
from service.errors import TemplateRefused
for source in json.load(sys.stdin).values():
    try:
        template = ChatTemplate(source, {})
        template.render([{"role": "user", "content": "x"}], None, add_generation_prompt=False)
        outcome = "rendered"
    except (RenderFailed, TemplateRefused) as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome), flush=True)
"""


def outcomes(templates: Mapping[str, str]) -> dict[str, str]:
    """Compile and render, each template in its own time: one that freezes takes no other with it."""
    found: dict[str, str] = {}
    while waiting := {name: source for name, source in templates.items() if name not in found}:
        found |= up_to_a_freeze(waiting)
    return found


def up_to_a_freeze(templates: Mapping[str, str]) -> dict[str, str]:
    """Compile and render in a process of its own, which can be stopped whatever it does."""
    found: dict[str, str] = {}
    command = [sys.executable, "-c", PROGRAM]
    # Unbuffered: what is still to be read is in the pipe, where it can be waited for.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        process.stdin.write(json.dumps(templates).encode())
        process.stdin.close()
        for name in templates:
            told, _, _ = select.select([process.stdout], [], [], FREEZE_S)
            line = process.stdout.readline() if told else b""
            found[name] = json.loads(line) if line else "ended its process" if told else "froze"
            if not line:
                process.kill()
                break
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes(POWERS | ENDLESS)


@pytest.mark.parametrize("name", POWERS)
def test_a_template_with_a_power_is_refused_before_it_is_computed(found: dict[str, str], name: str) -> None:
    assert found[name].startswith("TemplateRefused: the chat template raises to a power")


@pytest.mark.parametrize("name", ENDLESS)
def test_a_step_without_end_fails_before_it_is_done(found: dict[str, str], name: str) -> None:
    assert re.match(r"RenderFailed: (Overflow|Undefined)Error", found[name]), found[name]


def test_a_step_without_end_is_not_computed_while_compiling() -> None:
    source = "{% if false %}" + "".join(ENDLESS.values()) + "{% endif %}y"
    assert outcomes({"all": source}) == {"all": "rendered"}


def test_nothing_is_drawn_at_random_since_plans_are_made_again_with_the_same_bytes() -> None:
    with pytest.raises(TemplateRefused, match="random"):
        ChatTemplate("{{ [1, 2]|random }}", {})


def test_the_refusal_of_a_power_says_where_it_is_and_what_to_do() -> None:
    with pytest.raises(TemplateRefused, match="line 2") as caught:
        ChatTemplate("x\n{{ 2 ** 3 }}", {})
    assert caught.value.field == "chat_template" and caught.value.cure


def test_a_macro_that_calls_itself_twice_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.plan.rendering.RENDER_TIMEOUT_S", 0.2)
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    with pytest.raises(TemplateRefused, match="does not end"):
        ChatTemplate(source, {}).render(MESSAGES, None, add_generation_prompt=False)


def test_the_bound_on_added_lists_is_that_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.plan.template_bounds.MAX_ADDED", 20)
    template = ChatTemplate(
        "{% set ns = namespace(x=[]) %}{% set ns.x = ns.x + ['0123456789'] %}{{ ns.x[0] }}", {}
    )
    for _ in range(5):
        assert template.render(MESSAGES, None, add_generation_prompt=False).text == "0123456789"


@pytest.mark.parametrize(
    "source",
    [
        "{{ '(' * 100_000 }}".replace("'(' * 100_000", "(" * 100_000),
        "{{ " + "9" * 5000 + " }}",
        "{% for x in messages %}" * 60 + "{% endfor %}" * 60,
    ],
    ids=["nested", "digits", "loops"],
)
def test_what_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused, match="does not compile"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 3 }}{{ 3 * 4 + 5 - 2 }}{{ 7 // 2 }}{{ 7 / 2 }}{{ 7 % 3 }}",
        "{{ -1.5 * 2 }}{{ 2 * 'ab' }}{{ [1] * 2 }}",
        "{{ '%s: %5.2f|%-4d|%%' % ('x', 1.5, 7) }}{{ '%(a)s' % {'a': 1} }}{{ '%s' % messages[0].content }}",
        "{{ '{} {:>6} {a!r}'.format(1, 'x', a='y') }}",
        "{{ '{0}{0}'.format('z') }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ 'x'|center(9) }}{{ 'a\\nb'|indent(2, true) }}{{ 'x'.ljust(5) }}",
        "{{ '7'.zfill(3) }}{{ 'a b'|wordwrap(1) }}",
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ undefined_name ~ messages[0].content }}",
        "{{ 'a' + 'b' }}{{ ([1] + [2])|sum }}",
        "{{ messages|tojson(indent=4) }}{{ {'a': messages} | tojson }}{{ (messages, 1) }}{{ [[], {}] }}",
        "{{ messages|map(attribute='role')|join(', ') }}{{ ['a', 'b']|join }}",
        "{{ {'a': 1}|join }}{{ ','.join(['x', 'y']) }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map('tojson')|list }}",
        "{{ range(3)|batch(2, 0)|list }}{{ range(5)|slice(2)|list }}",
        "{{ 2.567|round(1) }}{{ 'aXa'.replace('a', 'bb') }}",
        "{{ 'aXa'|replace('a', 'b', 1) }}{{ 'a<b'|e }}",
        "{{ ('a<b'|safe) ~ '<' }}{{ 'A'|lower|upper|title|trim }}",
        "{% macro f(a, b=2) %}{{ a * b }}{% endmacro %}{{ f(3) }}{% set x %}y{{ f(1) }}{% endset %}{{ x }}",
        "{% for a, b in {'p': 1, 'q': 2}.items() %}{{ loop.index * 2 }}{{ a }}{{ b }}"
        "{% endfor %}{{ messages[-1:] }}",
        "{% set ns = namespace(t='', n=0) %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.t }}{{ ns.n }}{{ loop is defined }}{{ messages|first }}",
        "{% filter upper %}a{{ 'b' ~ 'c' }}{% endfilter %}{{ 'a b'.split(' ')[-1] }}",
        "{{ 'x' in 'xyz' }}{{ (1, 2)[0] }}{{ 0x10 }}{{ not 1 == 2 }}{{ 1 if false }}",
        "{{ {'b': 1, 'a': 2}|dictsort }}{{ [3, 1]|sort }}{{ 'a'|default('b') }}",
        "{{ x|default([1]) }}{{ [1, 1]|unique|list }}",
    ],
)
@pytest.mark.parametrize(
    "around", ["{}", "{{% for i in [1, 2] %}}{}{{% endfor %}}", "{{% block b %}}{}{{% endblock %}}"]
)
def test_plain_steps_render_as_in_transformers(source: str, around: str) -> None:
    source = around.format(source)
    ours: Any = ChatTemplate(source, {}).render(MESSAGES, None, add_generation_prompt=False)
    theirs, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ours.text == theirs[0]
