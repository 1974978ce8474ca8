#!/usr/bin/env python3
"""Writes what small templates print under transformers' Jinja environment, for src/template/tests.rs to compare.

    python3 -m venv .venv && .venv/bin/pip install transformers==5.23.0 jinja2==3.1.6
    .venv/bin/python make_expressions.py

Each case is a template and its text, or null where Python raises an error. Operators, filters, tests and slices are
crossed with values of every kind; the other cases are written out below.
"""

import itertools
import json
import pathlib

from make_goldens import fixed_clock
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).resolve().parent
# Read from JSON by both sides.
VARIABLES = r"""{
 "s": "Hello World", "u": "\u00e9\u4e2d\ud83d\udc4b a\nb", "big": 123456789012345678901234567890, "neg": -0.0, "tiny": 1e-7,
 "items": [{"name": "b", "n": 2, "on": true}, {"name": "A", "n": 10}, {"name": "c", "n": 1.5, "on": false, "sub": {"x": [1, 2]}}],
 "d": {"b": [1, 2.5, 1e20, 0.1], "a": {"x": null, "y": true, "\u00e9\"'<&>": "\u0007\t\u2028\ud83d\ude00"}, "items": 5, "1": -1e-5},
 "nested": [[1, [2, [3, []]]], {}], "text": "one two  three\n\nfour\u00a0five ", "html": "<a href='x'>\"&</a>"
}"""
VALUES = [
    "none", "true", "0", "3", "-2", "2.5", "(-0.0)", "1e20", "''", "'ab'", "\"it's\"", "[]", "[1, 'a']", "(1, 2)", "{}",
    "{'a': 1}", "absent", "range(3)",
]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
FILTERS = """abs capitalize center count default dictsort escape filesizeformat first float int items join last length
list lower max min reverse|list round safe sort string sum title tojson trim unique|list upper wordcount urlencode
tojson(indent=2) tojson(sort_keys=true) tojson(ensure_ascii=true) default('x',true) round(1) round(2,'ceil') int(7)
float(1.5) join(',') join(1) replace('a','b') batch(2)|list slice(2)|list indent sort(reverse=true) attr('x')
truncate(3,true,'') map('string')|list map('upper')|list select|list reject('none')|list selectattr('x')|list
map(attribute='a')|list format(1) items|list""".split()
TESTS = """boolean callable defined undefined even odd false true float integer number string mapping sequence iterable none
lower upper escaped divisibleby(2) eq(3) ne('ab') gt(1) le(2.5) in([1,3,'ab',none]) sameas(none) sameas(true) filter
test""".split()
METHODS = """upper() lower() title() capitalize() swapcase() casefold() strip() lstrip() rstrip() strip('Hd') lstrip('eH')
rstrip('d\\n') split() split(' ') split('o',1) split(maxsplit=1) split(none,1) rsplit() rsplit('o',1) rsplit(none,1)
splitlines() splitlines(true) startswith('H') startswith(('x','H')) startswith('e',1) endswith('d') endswith(('x',))
find('o') find('o',5) find('z') rfind('o') index('o') rindex('o') index('z') count('o') count('') count('l',3,9)
replace('o','0') replace('o','0',1) replace('','-') replace('l','') partition('o') rpartition('o') partition('z')
rpartition('z') removeprefix('He') removesuffix('ld') removeprefix('x') join(['a','b']) join('xyz') join([1]) center(20)
center(21,'*') ljust(15,'.') rjust(15) zfill(15) expandtabs(4) isalnum() isalpha() isdigit() isdecimal() isnumeric()
islower() isupper() istitle() isspace() isascii() isidentifier() isprintable() format(1) split('') encode() nothing()
upper(1) strip(1) replace('a') startswith(1) join(1) items() append(1) __class__""".split()
STRINGS = ["s", "u", "text", "''", "'ǆ ß ΑΣ'", "'12'", "'a b-c (d'", "' \\t\\x1c\\u2003'", "'Ab'"]
FORMATS = """%s %r %a %d %i %5d %-5d| %05d %+d %x %X %o %#x %.2f %8.3f %-8.2f| %08.2f %e %E %g %G %.3g %c %% %5s| %-5s| %.1s
%(a)s %(b)s %s%s %*d %z %""".split()
BRACES = """{} {0} {1} {a} {{}} {!r} {!s} {!a} {:>5} {:<5}| {:^5}| {:*^7} {:05} {:+} {:,} {:_} {:.2f} {:8.3f} {:e} {:g} {:%} {:d}
{:x} {:#x} {:b} {:s} {:.1} {0[a]} {0.a} {0[0]} {:{1}} {} {:.3g} {: } {:10,.2f} {""".split()
WRITTEN = r"""
{{ s[0] }}{{ s[-1] }}{{ s[99] }}{{ u[0] }}{{ u[2] }}|{{ u | length }}
{{ d.items }}|{{ d['items'] }}|{{ d.b[0] }}|{{ d['b'][-1] }}|{{ d.missing }}|{{ d['1'] }}
{{ d.missing.more }}
{{ none.x }}|{{ none.x is defined }}|{{ (1).x }}
{{ d.keys() }}|{{ d.values() | list }}|{{ d.a.items() | list }}|{{ d.a.items() }}
{{ d }}
{{ d | tojson }}
{{ d | tojson(indent=4) }}
{{ d | tojson(indent='--') }}
{{ d | tojson(separators=(',', ':')) }}|{{ d | tojson(false, 1, (';', '=')) }}
{{ big }}|{{ big + 1 }}|{{ big | tojson }}|{{ neg }}|{{ tiny }}|{{ [neg, tiny, 1e16, 1e15, 123456789.0, 0.1, 1.0e-4, 1.0e-5, 5e-324, 1.7976931348623157e308] }}
{{ 'a' ~ tiny ~ none ~ true ~ ['x'] ~ {'k': 'v'} ~ (1,) ~ absent ~ 1.0 }}
{{ ['a', 1, none, 1e-7, ['x'], absent] | join('-') }}
{{ "a'b" }}|{{ ["a'b", 'a"b', "a'\"b", "\n\t\\\x00\x7f\xe9\u200b\u2028\U0001F600"] }}
{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 == 1.0 == true }}{{ 'a' < 'b' }}{{ [1, 2] < [1, 3] }}{{ (1,) < (1, 0) }}
{{ 7 // 2 }}|{{ -7 // 2 }}|{{ 7 // -2 }}|{{ 7.5 // 2 }}|{{ -7 % 3 }}|{{ 7 % -3 }}|{{ -7.5 % 2 }}|{{ 7 / 2 }}|{{ 2 ** 10 }}|{{ 2 ** -1 }}|{{ 2 ** 0.5 }}|{{ 2 ** 3 ** 2 }}
{{ -2 ** 2 }}|{{ -3 | abs }}|{{ not 1 == 2 }}|{{ 1 + 2 ~ 3 }}|{{ 1 ~ 2 + 3 }}
{{ 2 * 'ab' }}|{{ 'ab' * 0 }}|{{ [1] * 3 }}|{{ (1,) * 2 }}|{{ 'ab' * -1 }}
{{ 'x' if none }}|{{ 'x' if none else 'y' }}|{{ 'a' if 0 else 'b' if 0 else 'c' }}
{{ (1) }}|{{ (1,) }}|{{ () }}|{{ 1, 2 }}|{{ [1, 2,] }}|{{ {'a': 1,} }}
{{ {1: 'a', '1': 'b', true: 'c', none: 'd', 1.5: 'e', (1, 2): 'f'} }}
{{ {1: 'a', none: 'b', true: 'c', 1.5: 'd', 2: 'e', false: 'f'} | tojson }}
{{ {(1, 2): 'f'} | tojson }}
{{ {[1]: 2} }}
{{ 'a' 'b' "c" }}|{{ "\x41\u00e9\101\q\'" }}|{{ 0x1F }}|{{ 0b11 }}|{{ 0o17 }}|{{ 1_000 }}|{{ 1e3 }}|{{ 1.5E-3 }}
{{ 'é\n' }}|{{ '日本' ~ "語" }}
{{ items | map(attribute='name') | join(',') }}|{{ items | map(attribute='sub.x.1', default='-') | join(',') }}
{{ items | selectattr('on') | map(attribute='name') | list }}|{{ items | rejectattr('on') | map(attribute='name') | list }}
{{ items | selectattr('on', 'defined') | list | length }}|{{ items | selectattr('n', 'gt', 1.7) | map(attribute='n') | list }}
{{ items | sort(attribute='name') | map(attribute='name') | list }}|{{ items | sort(attribute='n', reverse=true) | map(attribute='n') | list }}
{{ items | sort(attribute='name', case_sensitive=true) | map(attribute='name') | list }}|{{ items | sum(attribute='n') }}
{{ items | groupby('on') | list | length }}
{% for k, g in items | groupby('name') %}{{ k }}={{ g | length }};{% endfor %}
{{ items | map(attribute='n') | max }}|{{ items | map(attribute='n') | min }}|{{ ['b', 'A'] | max }}|{{ ['b', 'A'] | sort }}|{{ [3, 1, 2] | sort(reverse=true) }}
{{ [1, 'a'] | sort }}
{{ ['a', 'A', 'b'] | unique | list }}|{{ [1, 1.0, true, 2] | unique | list }}
{{ range(5) | batch(2, 'x') | list }}|{{ range(5) | slice(3, 'x') | list }}|{{ range(2, 10, 3) | list }}|{{ range(5, 0, -2) | list }}|{{ range(3)[1] }}|{{ range(10)[2:5] }}
{{ range(100001) }}
{{ range(0, 3, 0) }}
{{ items | map('upper') | list }}
{{ [1, 2] | map('nothing') | list }}
{{ [1, none, 0, 'a', ''] | select | list }}|{{ [1, 2, 3] | select('odd') | list }}|{{ [1, 2, 3] | reject('divisibleby', 2) | list }}
{{ (items | map(attribute='name'))[0] }}|{{ items | map(attribute='name') | first }}|{{ items | map(attribute='n') | list | last }}
{{ items | map(attribute='name') | length }}
{{ items | map(attribute='name') | tojson }}
{% set g = [1, 2] | map('string') %}{{ g | list }}{{ g | list }}
{{ 'x' in {'x': 1} }}{{ 1 in [1.0] }}{{ 'b' in 'abc' }}{{ 1 not in (2,) }}{{ none in [none] }}
{{ 1 in 'a' }}
{{ [] in {} }}
{{ dict(a=1, **{'b': 2}) }}|{{ dict({'a': 1}, a=2) }}|{{ dict([('x', 1)]) }}|{{ dict() }}|{{ dict.fromkeys(['a', 'b'], 0) }}
{{ d.get('b') }}|{{ d.get('z') }}|{{ d.get('z', 7) }}|{{ d.get('z', default=7) }}
{{ d.update({'x': 1}) }}
{{ nested.append(1) }}
{{ d.pop('a') }}
{{ nested.index({}) }}|{{ nested.count({}) }}|{{ (1, 2, 1).count(1) }}|{{ nested.copy() }}
{{ nested }}|{{ nested | tojson }}|{{ nested[0][1][1][1] }}|{{ nested == [[1, [2, [3, []]]], {}] }}
{% set ns = namespace(a=1, b='x') %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns['a'] }}
{% set ns = namespace({'a': 1}, c=2) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.c }}
{% set ns = namespace(_x=1) %}
{% set q = 1 %}{% set q.a = 2 %}
{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i // 2) }};{% endfor %}
{% for i in [] %}x{% else %}empty{% endfor %}|{% for i in absent %}x{% else %}none{% endfor %}
{% for i in none %}x{% endfor %}
{% for i in 5 %}x{% endfor %}
{% for c in 'héy' %}{{ c }}.{% endfor %}|{% for k in d %}{{ k }},{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}|{% for k, v in d | dictsort %}{{ k }},{% endfor %}|{% for k, v in d | items %}{{ k }},{% endfor %}
{% for a, b in [[1, 2], (3, 4)] %}{{ a }}{{ b }}{% endfor %}|{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for a, b in [[1, 2, 3]] %}{% endfor %}
{% for i in range(6) if i is odd %}{{ loop.index }}:{{ i }},{% endfor %}|{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for n in nested recursive %}[{% if n is iterable and n is not mapping %}{{ loop(n) }}{% else %}{{ n }}{% endif %}{{ loop.depth }}]{% endfor %}
{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 10 %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}|{% with x = 3, y = 4 %}{{ x }}{{ y }}{% set x = 9 %}{% endwith %}{{ x }}{{ y }}
{% set a, b = 1, [2, 3] %}{{ a }}{{ b }}|{% set t = 1, 2 %}{{ t }}|{% set (m, n) = (4, 5) %}{{ m }}{{ n }}
{% set a, b = [1] %}
{% set x %}a {{ 1 + 1 }} <b>{% endset %}{{ x }}|{% set y | upper | replace('A', 'z') %}abc{% endset %}{{ y }}
{% macro m(a, b='d', c=none) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, 2) }}|{{ m(b=5, a=6) }}|{{ m() }}|{{ m(1, c=2) }}|{{ m.name }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}
{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}
{% macro m() %}{{ x }}{% endmacro %}{% set x = 5 %}{{ m() }}{% for x in [1] %}{{ m() }}{% endfor %}
{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}body{{ s }}{% endcall %}
{% macro m() %}[{{ caller(1, b=2) }}]{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}
{% macro m() %}x{% endmacro %}{% call m() %}body{% endcall %}
{% macro m() %}x{% endmacro %}{{ m() | upper }}{{ m() is string }}{{ m }}
{% for i in [1, 2] %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}{{ m is defined }}
{% filter upper %}abc {{ s }}{% endfilter %}|{% generation %}g{% set gx = 1 %}{% endgeneration %}{{ gx }}
{% block one %}b{{ s }}{% endblock %}|{% raw %}{{ x }}{% y %}{% endraw %}|{# a comment #}x{#- y -#} z
{% if s %}a{% elif x %}b{% else %}c{% endif %}{% if not s %}a{% elif absent %}b{% else %}c{% endif %}
{% print s %}{% include 'x' %}
{{ raise_exception('no') }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %Y %A %B %j %y %I %p %-d %% %e') }}
{{ s | replace('o', 0) }}|{{ s | replace('o', '0', 1) }}|{{ 5 | replace(5, 6) }}|{{ s | truncate(5) }}|{{ s | truncate(5, true) }}|{{ 'a b c d e f g h i' | truncate(8, leeway=0) }}
{{ text | indent }}|{{ text | indent(2, true, true) }}|{{ 'a\nb\n' | indent('> ') }}|{{ '' | indent(2, first=true) }}
{{ text | wordcount }}|{{ text | title }}|{{ text | capitalize }}|{{ html | escape }}|{{ html | e | e }}|{{ text | trim }}|{{ 'xxaxx' | trim('x') }}
{{ 'a' | safe + html }}|{{ html + ('<' | safe) }}|{{ ('<' | safe) ~ html }}|{{ ['<' | safe, html] }}|{{ ('<' | safe) + 'b' == '<b' }}|{{ ('<x' | safe).upper() }}|{{ '<' | safe is escaped }}
{{ 42.55 | round(1) }}|{{ 42.55 | round(1, 'floor') }}|{{ 42 | round }}|{{ 2.5 | round }}|{{ 3.5 | round | int }}|{{ 1234 | round(-2) }}|{{ 1250 | round(-2) }}|{{ -1.5 | round }}|{{ 2.675 | round(2) }}
{{ '42' | int }}|{{ '42.9' | int }}|{{ 'x' | int(3) }}|{{ '0x1f' | int(0, 16) }}|{{ ' 7 ' | int }}|{{ '1_0' | int }}|{{ none | int }}|{{ '1e3' | int }}|{{ 3.99 | int }}|{{ '1.5' | float }}|{{ 'x' | float }}|{{ 'inf' | float }}|{{ true | int }}
{{ 1000 | filesizeformat }}|{{ 1 | filesizeformat }}|{{ 2048 | filesizeformat(true) }}|{{ 1500000000 | filesizeformat }}
{{ [1, [2]] | list }}|{{ 'abc' | list }}|{{ d | list }}|{{ 'abc' | reverse }}|{{ [1, 2] | reverse | list }}|{{ (1, 2) | first }}|{{ [] | first }}|{{ 'xy' | last }}
{{ absent | default }}|{{ absent | default('x') }}|{{ none | default('x') }}|{{ none | default('x', true) }}|{{ '' | d('y', boolean=true) }}
{{ s is string and s is not none }}|{{ absent is defined or s is defined }}|{{ 5 is divisibleby 5 }}|{{ s is eq 'Hello World' }}|{{ not s is none }}|{{ 3 is in [3] }}|{{ s is sameas s }}
{{ 'a' is filter }}|{{ 'upper' is filter }}|{{ 'odd' is test }}|{{ 1 is nothing }}
{{ 1 | nothing }}
{% if false %}{{ 1 | nothing }}{% endif %}ok
{% if false %}{{ 1 is nothing }}{% endif %}ok
{{ 'a b'.split()[1] }}|{{ 'a,b'.split(',') | last }}|{{ ' a '.strip().upper() }}|{{ 'abc'[::-1] }}|{{ 'abc'[1:] }}|{{ 'abc'[:-1] }}|{{ '</think>x'.split('</think>')[-1].lstrip('\n') }}
{{ cycler('a', 'b').next() }}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.current }}
{% set j = joiner('|') %}{% for i in [1, 2, 3] %}{{ j() }}{{ i }}{% endfor %}
{{ absent.x }}
{{ absent() }}
{{ absent + 1 }}
{{ absent ~ 'x' }}|{{ absent == absent }}|{{ absent == none }}|{{ not absent }}|{{ absent | length }}|{{ [absent] }}|{{ absent | list }}
{{ absent < 1 }}
{{ none + 'a' }}
{{ 'a' + 1 }}
{{ 1 + none }}
{{ s.x.y }}
{{ s() }}
{{ s(*[1]) }}
{{ range(*[1, 4]) | list }}|{{ dict(**{'a': 2}) }}|{{ 'x'.join(*[['a', 'b']]) }}
{{ messages.__class__ }}|{{ s.__len__ }}|{{ d._x }}
{{ messages.__class__.__mro__ }}
{{ loop }}|{{ loop is defined }}
{{ (1.5).is_integer() }}|{{ (2.0).is_integer() }}|{{ (5).bit_length() }}
{{ 1.5 | string ~ 1 | string }}|{{ [1, 2][0] | string }}|{{ 1 | string | length }}
{{ '%s' | format('x') }}|{{ '%s-%s' | format(1, 2) }}|{{ '%(a)s' | format(a=1) }}|{{ '%d%%' % 5 }}
{{ 'a\\b' }}|{{ "tab\there" }}|{{ '\n' | tojson }}|{{ "\u2028" | tojson }}|{{ '\x7f' | tojson(ensure_ascii=true) }}|{{ u | tojson(ensure_ascii=true) }}
{{ [1,2,3][-2:] }}|{{ [1,2,3][5:] }}|{{ (1,2,3)[::2] }}|{{ 'abcdef'[4:1:-2] }}|{{ 'abc'[2:0:-1] }}|{{ 'abc'[:0:-1] }}
{{ none[1:] }}
{{ d[1:] }}
{{ absent[1:] }}
{{ {'a': 1}['a':] }}
{{ s[1.5] }}|{{ [1][true] }}|{{ [1]['x'] }}|{{ d[none] }}|{{ 'abc'['upper']() }}
{{ d[[1]] }}
{{ true + true }}|{{ true * 'a' }}|{{ -true }}|{{ +true }}|{{ true // 2 }}|{{ true == 1 }}|{{ 'True' == true }}
{{ 'é' * 3 }}|{{ 'é' | upper }}|{{ 'ß' | upper }}|{{ 'İ' | lower }}|{{ 'ΑΣ' | lower }}
{{ 1 if true }}{{ 1 if false }}{{ (1 if false) is defined }}
{{ s | upper | lower | title | length + 1 }}|{{ -1 | abs + 1 }}|{{ 2 + 3 | string }}
{{ [1, 2] == (1, 2) }}|{{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }}|{{ [1, 2] != [1, 2] }}|{{ range(3) == range(0, 3) }}|{{ [none] == [absent] }}
{{ 10 ** 30 }}|{{ 123456789012345678 * 1000000007 }}|{{ 10 ** 20 // 7 }}|{{ -(10 ** 20) % 7 }}|{{ 10 ** 25 / 10 ** 24 }}|{{ 2 ** 64 == 18446744073709551616.0 }}
{{ 1 / 0 }}
{{ 1.0 // 0 }}
{{ 1 % 0 }}
"""
BLANKS = [
    "  {% if true %}\n  x\n  {% endif %}\ny",
    "a\n{%- if true -%}\n  x\n  {%- endif %}\n\n y",
    "a {%+ if true %} b {%+ endif +%}\n c",
    "  {{ 1 }}\n  {{- 2 -}}  \n 3",
    "\n\n  {# c #}\n  {#- c -#}  x\n{# c +#}\ny",
    "{% set x = 1 %}\n{% set y = 2 %}\n\n{{ x }}{{ y }}\n",
    "{% for i in [1, 2] %}\n  - {{ i }}\n{% endfor %}\nend\n\n",
    "x\r\ny\rz\r\n",
    "{%- raw %}\n {{ a }}\n{% endraw -%}\n b",
    "  {% raw -%}  {{ a }}  {%- endraw %}  \n b",
    "\t{% if true %}\t\n\tx{% endif %}",
    "x {% if true %}\ny {% endif %}\nz",
    "{{ '{{' }}{{ '%}' }}{{ \"}}\" }}{{ {'a': {'b': 1}} }}",
    "{{-1}}|{{- 1 }}|{{ - 1 }}|{{+1}}",
    "{%if true%}a{%endif%}{%-if true-%} b {%-endif-%} c",
    "{% if true %}{% endif %}\n\n\n",
    "a{#",
    "{{ 1",
    "{% if %}",
    "{% for %}",
    "{% endif %}",
    "{{ (1 }}",
    "{{ 'a }}",
    "{% break %}",
    "{% macro m() %}{% break %}{% endmacro %}",
    "{{ 1 2 }}",
    "{{ a.1.2 }}",
    "{{ [1, [2, 3]].1.0 }}",
    "{{ }}",
    "{% unknown %}",
    "{% set true = 1 %}",
    "{{ {% }}",
    "# plain { text } % } {",
    "{{ x is defined is none }}",
    "{{ [1, 2, 3]\n  | join(\n  '-'\n) }}",
    "{% for x in [1, 2] -%}\n  {{ x }}\n{%- else -%}\n{%- endfor %}",
]


def templates():
    yield from WRITTEN.strip("\n").split("\n")
    yield from BLANKS
    for a, operator, b in itertools.product(VALUES, OPERATORS, VALUES):
        yield f"{{{{ {a} {operator} {b} }}}}"
    for value, name in itertools.product(VALUES, FILTERS):
        yield f"{{{{ ({value}) | {name} }}}}"
    for value, name in itertools.product(VALUES, TESTS):
        yield f"{{{{ ({value}) is {name} }}}}"
    for value, method in itertools.product(STRINGS, METHODS):
        yield f"{{{{ {value}.{method} }}}}"
    for value, form in itertools.product(VALUES, FORMATS):
        yield f"{{{{ '{form}' % ({value}) }}}}"
    for value, form in itertools.product(VALUES, BRACES):
        yield f"{{{{ '{form}'.format({value}, 7, a={value}) }}}}"
    bounds = ["", "0", "1", "-1", "9", "-9"]
    for value, start, stop, step in itertools.product(
        ["'abcde'", "[1, 2, 3]"], bounds, bounds, ["", ":2", ":-1", ":-2"]
    ):
        yield f"{{{{ {value}[{start}:{stop}{step}] }}}}"


def render(template, variables):
    """The text, or None where it cannot be made."""
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[[{"role": "user", "content": "hi"}]], chat_template=template, **variables
        )
        texts[0].encode()
        return texts[0]
    except Exception:  # whatever a template does
        return None


def main():
    fixed_clock()
    variables = json.loads(VARIABLES)
    cases = {template: render(template, variables) for template in templates()}
    # Addresses of objects differ from run to run.
    cases = {template: text for template, text in cases.items() if " at 0x" not in (text or "")}
    lines = ",\n".join(f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(text)}" for key, text in cases.items())
    document = f'{{"variables": {VARIABLES},\n"cases": {{\n{lines}\n}}}}\n'
    (HERE / "expressions" / "expressions.json").write_text(document)


if __name__ == "__main__":
    main()
