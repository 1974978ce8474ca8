//! Chat templates of our own, in the notation of families whose templates may not be copied here or are no Jinja text: earlier calls as the models
//! of the family are taught to write them.

/// Name, and the template's text of one assistant turn: `message` is the turn.
pub(crate) const STYLES: [(&str, &str); 13] = [
    // A whole answer: Llama's own template leaves the text beside a call out.
    (
        "style-llama-3-json",
        r#"{{ '<|python_tag|>' if false }}{% for call in message.tool_calls %}{{ '{"name": ' }}{{ call.function.name | tojson }}{{ ', "parameters": ' }}{{ call.function.arguments | tojson }}{{ '}' }}{% endfor %}"#,
    ),
    (
        "style-llama-4-pythonic",
        r#"{{ '[func_name1(' if false }}{{ '<|python_start|>' }}[{% for call in message.tool_calls %}{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{{ '<|python_end|>' }}"#,
    ),
    (
        "style-kimi-k2",
        "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    ),
    (
        "style-minimax-m1",
        "{{ '<think></think>' if false }}<tool_calls>\n{% for call in message.tool_calls %}{\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}\n{% endfor %}</tool_calls>",
    ),
    (
        "style-minimax-m2",
        "{{ '<think></think>' if false }}<minimax:tool_call>\n{% for call in message.tool_calls %}<invoke name=\"{{ call.function.name }}\">\n{% for name, value in call.function.arguments.items() %}<parameter name=\"{{ name }}\">{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    ),
    (
        "style-deepseek-v3.2",
        "{{ '<think></think>' if false }}<｜DSML｜function_calls>\n{% for call in message.tool_calls %}<｜DSML｜invoke name=\"{{ call.function.name }}\">\n{% for name, value in call.function.arguments.items() %}<｜DSML｜parameter name=\"{{ name }}\" string=\"{{ 'true' if value is string else 'false' }}\">{{ value if value is string else value | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>",
    ),
    (
        "style-granite-3",
        "<|tool_call|>[{% for call in message.tool_calls %}{\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]",
    ),
    (
        "style-granite-20b",
        "{% for call in message.tool_calls %}<function_call> {\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        "style-gemma-4",
        r#"{% macro value(of) %}{% if of is string %}{{ '<|"|>' }}{{ of }}{{ '<|"|>' }}{% elif of is mapping %}{{ '{' }}{% for name, part in of.items() %}{{ name }}:{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif of is boolean or of is none or of is number %}{{ of | tojson }}{% else %}[{% for part in of %}{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}]{% endif %}{% endmacro %}{{ '<|channel>thought<channel|>' if false }}{% for call in message.tool_calls %}<|tool_call>call:{{ call.function.name }}{{ value(call.function.arguments) }}<tool_call|>{% endfor %}"#,
    ),
    (
        "style-function-gemma",
        r#"{% macro value(of) %}{% if of is string %}<escape>{{ of }}<escape>{% elif of is mapping %}{{ '{' }}{% for name, part in of.items() %}{{ name }}:{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif of is boolean or of is none or of is number %}{{ of | tojson }}{% else %}[{% for part in of %}{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}]{% endif %}{% endmacro %}{% for call in message.tool_calls %}<start_function_call>call:{{ call.function.name }}{{ value(call.function.arguments) }}<end_function_call>{% endfor %}"#,
    ),
    (
        "style-tool-code",
        "```tool_code\n{% for call in message.tool_calls %}{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})\n{% endfor %}```",
    ),
    (
        "style-olmo-3",
        "{{ '<think></think>' if false }}<function_calls>{% for call in message.tool_calls %}{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}</function_calls>",
    ),
    (
        "style-phi-4-mini",
        "functools[{% for call in message.tool_calls %}{\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]",
    ),
];

/// Whole templates: Phi-4-mini's own (microsoft/Phi-4-mini-instruct, MIT), and ours with the demands that templates of other families make on earlier
/// turns.
pub(crate) const WHOLE: [(&str, &str); 5] = [
    (
        PHI_4_MINI,
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
    ),
    (
        KIMI_IDS,
        "{% for message in messages %}<|im_{{ message.role }}|>{{ message.content }}{% if message.role == 'tool' %} is what {{ message.tool_call_id }} returned{% endif %}{% if message.tool_calls %}<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endfor %}",
    ),
    (
        "style-one-call",
        r#"{{ '<|python_tag|>' if false }}{% for message in messages %}<{{ message.role }}>{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}{{ '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}{{ message.tool_calls[0].function.arguments | tojson }}{{ '}' }}{% else %}{{ message.content }}{% endif %}{% endfor %}"#,
    ),
    (
        "style-named-results",
        "{% for message in messages %}<{{ message.role }}>{% if message.role == 'tool' %}{% if not message.name %}{{ raise_exception('a result needs a name') }}{% endif %}<start_function_response>{{ message.name }}:{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{}<end_function_call>{% endfor %}{% endfor %}",
    ),
    (
        "style-first-system",
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}{{ raise_exception('the system message stands first') }}{% endif %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}",
    ),
];

pub(crate) const PHI_4_MINI: &str = "phi-4-mini-instruct";
pub(crate) const KIMI_IDS: &str = "style-kimi-ids";

/// Style whose turns are calls or text.
const EITHER: &str = "style-llama-3-json";

/// Whole chat template of a style.
pub(crate) fn source(style: &str) -> Option<String> {
    if let Some((_, whole)) = WHOLE.iter().find(|(name, _)| *name == style) {
        return Some((*whole).to_owned());
    }
    let (name, turn) = STYLES.iter().find(|(name, _)| *name == style)?;
    let text = if *name == EITHER { "'' if message.tool_calls else message.content" } else { "message.content or ''" };
    Some(format!(
        "{{% for message in messages %}}{{% if message.role == 'user' %}}<user>{{{{ message.content }}}}{{% else %}}<assistant>\
        {{{{ {text} }}}}{{% if message.tool_calls %}}{turn}{{% endif %}}{{% endif %}}<eos>{{% endfor %}}\
        {{% if add_generation_prompt %}}<assistant>{{% endif %}}"
    ))
}
