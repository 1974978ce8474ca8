//! A small model of each family's format: a tokenizer of single bytes with the family's marks, and a template that
//! shows the format.

use std::sync::{Arc, OnceLock};

use penstock_text::{TextFiles, TextModel, ToolFormat};
use serde_json::{Value, json};

/// Format, sign in the template, special tokens, and other added tokens.
pub(crate) struct Family {
    pub(crate) format: ToolFormat,
    template: &'static str,
    special: &'static [&'static str],
    added: &'static [&'static str],
}

/// Pieces of several bytes, so that texts have more than one tokenization.
const CHUNKS: [&str; 12] =
    ["{\"", "\": \"", "\"}", "</", "ool_c", "all>", "\n\n", "get_", "weather", "argum", "ents\": {", "[{"];

pub(crate) const END: &str = "<eos>";

macro_rules! family {
    ($format:ident, $template:expr, $special:expr, $added:expr) => {
        Family { format: ToolFormat::$format, template: $template, special: &$special, added: &$added }
    };
}

pub(crate) static FAMILIES: [Family; 23] = [
    family!(
        Hermes,
        "<think></think> {\"name\": } <tool_call>",
        [],
        ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    ),
    family!(Qwen3Coder, "<tool_call>\n<function=", [], ["<tool_call>", "</tool_call>"]),
    family!(
        SeedOss,
        "<seed:tool_call> <function=",
        ["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"],
        []
    ),
    family!(Llama3Json, "\"parameters\": ipython", ["<|python_tag|>"], []),
    family!(Pythonic, "[func_name1(", ["<|python_start|>", "<|python_end|>"], []),
    family!(Mistral, "[TOOL_CALLS]", ["[TOOL_CALLS]", "[THINK]", "[/THINK]"], []),
    family!(Mistral, "[TOOL_CALLS] [ARGS]", ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], []),
    family!(
        DeepSeekV3,
        "<｜tool▁call▁begin｜> ```json </think>",
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>"
        ],
        ["<think>", "</think>"]
    ),
    family!(
        DeepSeekV31,
        "<｜tool▁call▁begin｜> </think>",
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>"
        ],
        ["<think>", "</think>"]
    ),
    family!(DeepSeekV32, "｜DSML｜", ["｜DSML｜"], ["<think>", "</think>"]),
    family!(
        Glm,
        "<arg_key> <think></think>",
        [],
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>"
        ]
    ),
    family!(
        KimiK2,
        "<|tool_calls_section_begin|>",
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ],
        ["<think>", "</think>"]
    ),
    family!(
        Harmony,
        "<|channel|>analysis<|message|> <|end|>",
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"],
        []
    ),
    family!(Granite, "<|tool_call|>", ["<|tool_call|>"], []),
    family!(Granite20b, "<function_call>", ["<function_call>"], []),
    family!(MiniMaxM1, "<tool_calls> <think></think>", [], []),
    family!(
        MiniMaxM2,
        "<minimax:tool_call> <think></think>",
        ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
        []
    ),
    family!(FunctionGemma, "<start_function_call>", ["<start_function_call>", "<end_function_call>", "<escape>"], []),
    family!(
        Gemma4,
        "<|tool_call> <tool_call|> <|channel>thought <channel|>",
        ["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"],
        []
    ),
    family!(ToolCode, "```tool_code", [], []),
    family!(Olmo3, "<function_calls> <think></think>", [], []),
    family!(Phi4Mini, "functools[", [], []),
    family!(
        Phi4MiniMarked,
        "<|tool|> <|/tool|>",
        [],
        ["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"]
    ),
];

impl Family {
    /// Model of the family, built once.
    pub(crate) fn model(&self) -> Arc<TextModel> {
        static MODELS: [OnceLock<Arc<TextModel>>; FAMILIES.len()] = [const { OnceLock::new() }; FAMILIES.len()];
        let place = FAMILIES.iter().position(|family| family.template == self.template).expect("one of the families");
        MODELS[place].get_or_init(|| self.build()).clone()
    }

    /// Number of the family's marks that a template has, less those that it lacks.
    pub(crate) fn marks_in(&self, template: &str) -> isize {
        self.special.iter().map(|mark| if template.contains(mark) { 1 } else { -1 }).sum()
    }

    fn build(&self) -> Arc<TextModel> {
        let model = self.with_template(&format!("{{# {} #}}", self.template));
        assert_eq!(model.tool_format(), Some(self.format), "{}", self.template);
        model
    }

    /// Model with the family's marks and a template of a checkpoint.
    pub(crate) fn with_template(&self, template: &str) -> Arc<TextModel> {
        let mut added: Vec<Value> = Vec::new();
        let special = self.special.iter().chain([&END]).map(|name| (*name, true));
        for (name, special) in special.chain(self.added.iter().chain(&CHUNKS).map(|name| (*name, false))) {
            added.push(json!({
                "id": 256 + added.len(), "content": name, "special": special, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false,
            }));
        }
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "vocab": byte_vocabulary(), "merges": [],
            },
        });
        let config = json!({ "eos_token": END }).to_string();
        let model = TextModel::load(&TextFiles {
            tokenizer_json: tokenizer.to_string().into_bytes().into(),
            tokenizer_config_json: Some(config.into_bytes().into()),
            chat_template_jinja: Some(template.as_bytes().to_vec().into()),
            ..TextFiles::default()
        });
        Arc::new(model.expect("a model of the test's own"))
    }
}

/// Names of single bytes in byte-level vocabularies, as GPT-2 has them, with the byte as id.
fn byte_vocabulary() -> serde_json::Map<String, Value> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(code).expect("a letter").to_string(), byte.into())
        })
        .collect()
}
