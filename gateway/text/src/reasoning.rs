//! Separation of reasoning from an answer: `<think> … </think>` at its beginning.
//!
//! Characters go in one at a time, so the result does not depend on the cuts of the text. Reasoning can only begin an
//! answer (or has begun in the prompt); a mark later in the text is plain text. Line breaks that only set the marks
//! apart are dropped, since templates put them back. Everything else comes out, as reasoning or as answer.

use tokenizers::Tokenizer;

use crate::{literal::Literal, piece::Pieces};

/// Pair of marks that a model writes around its reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningMarkers {
    /// Mark that opens the reasoning, such as `<think>`.
    pub open: String,
    /// Mark that closes the reasoning, such as `</think>`.
    pub close: String,
}

/// Marks of one family of models.
struct Known {
    /// Names for configs: our own first, then those of other servers.
    names: &'static [&'static str],
    open: &'static str,
    close: &'static str,
    /// Text that goes on with the answer behind a closing mark that the model did not write itself.
    resume: &'static str,
}

/// What follows a closing mark that the model did not write itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoesOn {
    /// Nothing: whatever a grammar demands comes next.
    AtTheMark,
    /// Text that leaves the model any part of an answer next, a call too.
    WithAnyPart,
    /// Text that begins the answer.
    WithTheAnswer,
}

/// Marks in use. The first pair that a checkpoint shows counts.
const KNOWN: [Known; 8] = [
    Known {
        names: &["harmony", "openai_gptoss", "gpt_oss", "gpt-oss"],
        open: "<|channel|>analysis<|message|>",
        close: "<|end|>",
        resume: "<|start|>assistant<|channel|>final<|message|>",
    },
    Known {
        names: &[
            "think",
            "deepseek_r1",
            "deepseek_v3",
            "qwen3",
            "glm45",
            "glm47",
            "kimi_k2",
            "minimax_m1",
            "minimax_m2",
            "olmo3",
            "nemotron_v3",
            "ernie45",
            "hunyuan_a13b",
            "step3",
            "holo2",
            "mimo",
        ],
        open: "<think>",
        close: "</think>",
        resume: "\n\n",
    },
    Known { names: &["mistral", "magistral"], open: "[THINK]", close: "[/THINK]", resume: "" },
    Known { names: &["seed_oss"], open: "<seed:think>", close: "</seed:think>", resume: "" },
    Known {
        names: &["cohere_command3", "cohere_command4", "command_a"],
        open: "<|START_THINKING|>",
        close: "<|END_THINKING|>",
        resume: "",
    },
    Known { names: &["gemma4"], open: "<|channel>thought\n", close: "<channel|>", resume: "" },
    Known { names: &["kimi_vl"], open: "◁think▷", close: "◁/think▷", resume: "" },
    Known { names: &["granite"], open: "Here is my thought process:", close: "Here is my response:", resume: "\n" },
];

impl ReasoningMarkers {
    /// Marks of a model: a known pair that is among its added tokens, or whose closing mark its template writes.
    pub(crate) fn detect(tokenizer: &Tokenizer, template: &str) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary().get_vocab();
        let shown = |known: &&Known| {
            // Common words alone are no sign: `<|end|>` ends a message of Phi's, too.
            let opened = template.contains(known.open.trim_end());
            let closed =
                template.contains(known.close) && (opened || known.open.starts_with('<') && known.close != "<|end|>");
            (added.contains_key(known.open) && added.contains_key(known.close)) || closed
        };
        KNOWN.iter().find(shown).map(Known::markers)
    }

    /// Marks by a name of a config: our own (`think`, `harmony`), or the name of a family as vLLM's
    /// `--reasoning-parser` has it. Case does not count. `None`: no such name.
    pub fn from_name(name: &str) -> Option<Self> {
        let named = |known: &&Known| known.names.iter().any(|known| known.eq_ignore_ascii_case(name));
        KNOWN.iter().find(named).map(Known::markers)
    }

    /// Text that closes the reasoning in the model's place, when its budget is spent.
    pub fn forced_close(&self, goes_on: GoesOn) -> String {
        let known = KNOWN.iter().find(|known| known.close == self.close && known.open == self.open);
        let front = known.filter(|known| known.open == "<think>").map_or("", |_| "\n");
        let resume = known.map_or("", |known| known.resume);
        let resume = match goes_on {
            GoesOn::AtTheMark => "",
            // A later message has a header, in which the model chooses the channel.
            GoesOn::WithAnyPart => resume.split_once("<|channel|>").map_or(resume, |(header, _)| header),
            GoesOn::WithTheAnswer => resume,
        };
        format!("{front}{}{resume}", self.close)
    }

    /// Returns true if an answer may reason in several places: each part of it says in front whether it is reasoning.
    pub fn open_anywhere(&self) -> bool {
        self.open == KNOWN[0].open
    }

    /// Returns true if a token's name is part of a mark.
    pub(crate) fn contain(&self, name: &str) -> bool {
        !name.is_empty() && (self.open.contains(name) || self.close.contains(name))
    }

    /// Returns true if a prompt leaves the model inside its reasoning.
    ///
    /// `continued`: text of the message that the answer goes on with, at the end of the prompt. Marks in other messages are text.
    pub(crate) fn opened_by(&self, prompt: &str, continued: Option<&str>) -> bool {
        let opens = |text: &str| text.trim_end().ends_with(self.open.trim_end());
        if opens(prompt) {
            return true;
        }
        let Some(text) = continued else { return false };
        match (text.rfind(&self.open), text.rfind(&self.close)) {
            // The template may have opened the reasoning in front of the message.
            (None, None) => prompt.trim_end().strip_suffix(text.trim()).is_some_and(opens),
            (open, close) => open > close,
        }
    }
}

impl Known {
    fn markers(&self) -> ReasoningMarkers {
        ReasoningMarkers { open: self.open.into(), close: self.close.into() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Only blanks so far; the opening mark may still come.
    Start,
    /// In the reasoning, behind the opening mark.
    Reasoning,
    /// After the closing mark, where line breaks are dropped.
    Between,
    /// In the answer's text, behind the reasoning or without any.
    Answer,
}

/// State of separating reasoning from the text of one answer.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    at: At,
    open: Literal,
    close: Literal,
    /// Blanks in front of the opening mark, or line breaks that may stand in front of the closing one.
    held: String,
    /// True if any text of the reasoning has come out.
    begun: bool,
}

impl ReasoningSplitter {
    pub(crate) fn new(markers: &ReasoningMarkers, opened: bool) -> Self {
        Self {
            at: if opened { At::Reasoning } else { At::Start },
            open: Literal::new(&markers.open),
            close: Literal::new(&markers.close),
            held: String::new(),
            begun: false,
        }
    }

    pub(crate) fn is_reasoning(&self) -> bool {
        self.at == At::Reasoning
    }

    /// Takes the character at `offset`; answer characters go to `answer` with their offsets.
    pub(crate) fn push(
        &mut self,
        offset: usize,
        c: char,
        out: &mut Pieces,
        answer: &mut impl FnMut(usize, char, &mut Pieces),
    ) {
        match self.at {
            At::Start => self.start(offset, c, out, answer),
            At::Reasoning => {
                if self.close.push(c) {
                    self.held.clear();
                    self.at = At::Between;
                } else {
                    let free = self.close.take_released();
                    free.chars().for_each(|c| self.reasoning(c, out));
                }
            }
            At::Between if c == '\n' => {}
            At::Between | At::Answer => {
                self.at = At::Answer;
                answer(offset, c, out);
            }
        }
    }

    fn start(&mut self, offset: usize, c: char, out: &mut Pieces, answer: &mut impl FnMut(usize, char, &mut Pieces)) {
        if self.open.is_idle() && c.is_whitespace() {
            self.held.push(c);
        } else if self.open.push(c) {
            self.held.clear();
            self.at = At::Reasoning;
        } else if self.open.is_idle() || !self.open.released_is_empty() {
            // The opening mark is absent: all held text is the answer's beginning.
            let text = std::mem::take(&mut self.held) + &self.open.take_all();
            self.at = At::Answer;
            forward(&text, offset + c.len_utf8() - text.len(), out, answer);
        }
    }

    fn reasoning(&mut self, c: char, out: &mut Pieces) {
        if c == '\n' {
            if self.begun {
                self.held.push(c);
            }
            return;
        }
        self.begun = true;
        out.reasoning(&std::mem::take(&mut self.held));
        out.reasoning(c.encode_utf8(&mut [0; 4]));
    }

    /// Ends the text at `offset` and releases the held text.
    pub(crate) fn finish(
        &mut self,
        offset: usize,
        out: &mut Pieces,
        answer: &mut impl FnMut(usize, char, &mut Pieces),
    ) {
        match self.at {
            At::Start => {
                let text = std::mem::take(&mut self.held) + &self.open.take_all();
                forward(&text, offset - text.len(), out, answer);
            }
            At::Reasoning => {
                let text = self.close.take_all();
                text.chars().for_each(|c| self.reasoning(c, out));
                if self.begun {
                    out.reasoning(&std::mem::take(&mut self.held));
                }
            }
            At::Between | At::Answer => {}
        }
    }
}

fn forward(text: &str, at: usize, out: &mut Pieces, answer: &mut impl FnMut(usize, char, &mut Pieces)) {
    for (index, c) in text.char_indices() {
        answer(at + index, c, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_once() {
        let mut names: Vec<&str> = KNOWN.iter().flat_map(|known| known.names.iter().copied()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for name in names {
            assert!(ReasoningMarkers::from_name(&name.to_uppercase()).is_some(), "{name}");
        }
        assert_eq!(ReasoningMarkers::from_name("none"), None);
    }

    #[test]
    fn forced_ends_go_on_with_the_answer() {
        use GoesOn::{AtTheMark, WithAnyPart, WithTheAnswer};
        let own = ReasoningMarkers { open: "<a>".into(), close: "</a>".into() };
        let named = |name: &str| ReasoningMarkers::from_name(name).expect("known");
        for (markers, goes_on, text) in [
            (named("qwen3"), WithTheAnswer, "\n</think>\n\n"),
            (named("qwen3"), WithAnyPart, "\n</think>\n\n"),
            (named("qwen3"), AtTheMark, "\n</think>"),
            (named("gpt_oss"), WithTheAnswer, "<|end|><|start|>assistant<|channel|>final<|message|>"),
            (named("gpt_oss"), WithAnyPart, "<|end|><|start|>assistant"),
            (named("gpt_oss"), AtTheMark, "<|end|>"),
            (own, WithTheAnswer, "</a>"),
        ] {
            assert_eq!(markers.forced_close(goes_on), text);
        }
    }

    #[test]
    fn prompts_that_open_reasoning() {
        let gemma = ReasoningMarkers::from_name("gemma4").expect("known");
        assert!(gemma.opened_by("<|turn>model\n<|channel>thought\n", None));
        let think = ReasoningMarkers::from_name("think").expect("known");
        assert!(think.opened_by("<think>\n", None) && !think.opened_by("<think></think>", None));
        // Texts in front of a message that is continued, and the message.
        for (before, text, opens) in [
            ("", "<think>one", true),
            ("", "<think>one</think> two", false),
            ("<think>\n", "one ", true),
            ("<think>\n", "one</think> two", false),
            ("<think>\nzero\n</think>\n\n", "one", false),
            ("no <think> tags, please\n", "one", false),
            ("no <think> tags, please\n", "</think>one<think>two", true),
            ("</think>", "one <think>\n", true),
        ] {
            assert_eq!(think.opened_by(&format!("{before}{text}"), Some(text)), opens, "{before:?} {text:?}");
        }
        assert!(!think.opened_by("<think> ONE", Some("one")), "the template writes another text");
    }
}
