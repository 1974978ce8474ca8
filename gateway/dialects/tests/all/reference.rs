//! `docs/reference/openai.md` agrees with the code on every error and every bound.

use penstock_types::{Bounds, error_shape};

const REFERENCE: &str = include_str!("../../../../docs/reference/openai.md");

#[test]
fn every_error_is_in_the_reference() {
    for shape in error_shape::SHAPES {
        let code = shape.code.map_or("null".to_owned(), |code| format!("`{code}`"));
        let row = format!("| {} | `{}` | {code} |", shape.status, shape.kind);
        assert_eq!(REFERENCE.matches(&row).count(), 1, "{row}");
    }
}

#[test]
fn every_bound_is_in_the_reference() {
    // A new bound must be named here, so it is not forgotten there.
    let Bounds {
        model_chars_max,
        messages_max,
        parts_max,
        tool_calls_max,
        tools_max,
        tool_bytes_max,
        tool_depth_max,
        constraint_bytes_max,
        constraint_choices_max,
        name_chars_max,
        stop_max,
        stop_chars_max,
        stop_tokens_max,
        logprob_tokens_max,
        allowed_tokens_max,
        logit_bias_max,
        n_max,
        logprobs_max,
        prompts_max,
        inputs_max,
        choices_max,
        prompt_tokens_max,
        suffix_chars_max,
        metadata_max,
        template_kwargs_bytes_max,
        template_kwargs_max,
        template_kwargs_depth_max,
        fields_max,
        inner_fields_max,
        ignored_max,
    } = Bounds::default();
    for row in [
        format!("| `model` | {model_chars_max} characters |"),
        format!("| `messages` | {messages_max} |"),
        format!("| content parts of a message | {parts_max} |"),
        format!("| `tool_calls` of a message | {tool_calls_max} |"),
        format!("| `tools` | {tools_max} |"),
        format!("| one tool, spaces left out | {tool_bytes_max} bytes, {tool_depth_max} levels |"),
        format!(
            "| a regular expression, a grammar, a structural tag (spaces left out), all texts of a choice | {constraint_bytes_max} bytes |"
        ),
        format!("| texts of a choice; structures, triggers of a structural tag | {constraint_choices_max} |"),
        format!("| names and ids (function, call, participant, `cache_salt`) | {name_chars_max} characters"),
        format!("| `stop` | {stop_max} strings of {stop_chars_max} characters |"),
        format!("| `stop_token_ids` | {stop_tokens_max} |"),
        format!("| `logprob_token_ids` | {logprob_tokens_max} |"),
        format!("| `allowed_token_ids` | {allowed_tokens_max} |"),
        format!("| `logit_bias` | {logit_bias_max} entries |"),
        format!("| `n`, `best_of` | {n_max} |"),
        format!("| `top_logprobs`, `logprobs`, `prompt_logprobs` | {logprobs_max} |"),
        format!("| `prompt`: prompts | {prompts_max} |"),
        format!("| `input`, `documents`, `text_2`: texts | {inputs_max} |"),
        format!("| prompts times `best_of` | {choices_max} |"),
        format!("| token ids of one prompt, or to detokenize | {prompt_tokens_max} |"),
        format!("| `suffix` | {suffix_chars_max} characters |"),
        format!("| `metadata` | {metadata_max} pairs of"),
        format!(
            "| {template_kwargs_bytes_max} bytes, {template_kwargs_max} names, {template_kwargs_depth_max} levels |"
        ),
        format!("| fields of the body | {fields_max} |"),
        format!("| fields of an object inside it (a message, a part, a call…) | {inner_fields_max} |"),
        format!("the first {ignored_max} names"),
    ] {
        assert!(REFERENCE.contains(&row), "{row}");
    }
}
