//! Share of grammars in a step's CPU time: `guided-step FOLDER FILE [--threads N] [--path NAME] [--rounds N]`, where FOLDER is a checkpoint and each line
//! of FILE is a token's bytes in hexadecimal, in the order of their ids.
//!
//! 32 sequences decode, each under a grammar of its own, and 32 without, in turns of one process. Prints for both the CPU time of a step, apart for the model and
//! for everything else, rows and tokens. Each mask is computed once more beside the engine, in grammars of its own that are as warm, for the distribution
//! of its time; that work is in no step. CPU time, since the clock on the wall says more about whoever else uses the machine.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::{KvBudget, Model, ModelLimits};
use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_grammar::{CacheSizes, Grammars, Matcher, Source, TokenText, Vocabulary};
use penstock_kernels::cpu::{CpuDevice, CpuOptions, Path};
use penstock_kernels::{Held, KernelError, KvFormat, Limits, Pick, SampledRows, StepBatch};
use penstock_proto::frames::{Cancel, ChoiceStart, Generate, Guide, GuideKind, Sampling, Step};
use serde_json::json;

/// Sequences that decode together.
const BATCH: usize = 32;
/// Steps of a round that are timed.
const STEPS: usize = 40;
/// Kinds of grammars, in turns.
const KINDS: [&str; 4] =
    ["objects with long strings", "arrays of objects", "recursive lists", "regular expressions and Lark"];
/// Tokens of a prompt.
const PROMPT: u64 = 20;
/// Rows of a step at most: all prompts at once.
const ROWS_MAX: usize = 1024;

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time of this thread so far: threads of the model may still be waiting for work.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time and rows of the model so far.
#[derive(Clone, Copy, Default)]
struct Spent {
    time: Duration,
    rows: usize,
}

/// The model, and what it has spent.
struct Timed {
    model: Model,
    spent: Arc<Mutex<Spent>>,
}

/// Adds the CPU time of `work`, a pass over `rows` rows.
fn timed<T>(spent: &Mutex<Spent>, rows: usize, work: impl FnOnce() -> T) -> T {
    let began = cpu_time();
    let done = work();
    let mut spent = spent.lock().unwrap_or_else(PoisonError::into_inner);
    spent.time += cpu_time() - began;
    spent.rows += rows;
    done
}

impl Forward for Timed {
    fn geometry(&self) -> Geometry {
        self.model.geometry()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        let Self { model, spent } = self;
        timed(spent, batch.tokens.len(), || model.forward(batch, after_layer))
    }

    fn sample(
        &mut self,
        batch: &StepBatch<'_>,
        after_layer: AfterLayer<'_>,
        picks: &[Pick],
    ) -> Result<SampledRows<'_>, KernelError> {
        let Self { model, spent } = self;
        timed(spent, batch.tokens.len(), || model.sample(batch, after_layer, picks))
    }

    fn pages(&self) -> &dyn Pages {
        self.model.pages()
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.model.write_page(layer, page, bytes);
    }
}

/// Grammars of several kinds and names, whose texts are long enough for all steps.
fn sources() -> Vec<Source> {
    let closed = |properties: serde_json::Value| {
        let required: Vec<String> = properties.as_object().expect("an object").keys().cloned().collect();
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    (0..BATCH)
        .map(|n| match n % KINDS.len() {
            0 => Source::json_schema(
                closed(json!({
                    format!("title_{n}"): {"type": "string", "maxLength": 40},
                    "count_of_items": {"type": "integer", "minimum": n, "maximum": 5000},
                    "state": {"enum": ["open", "closed", "waiting for an answer"]},
                    "notes": {"type": "array", "items": {"type": "string", "maxLength": 100 + n}, "minItems": 60},
                }))
                .to_string(),
            ),
            1 => {
                let item = closed(json!({
                    format!("name_{n}"): {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
                    "amount": {"type": "number"}, "is_final": {"type": "boolean"},
                    "created": {"type": "string", "format": "date-time"},
                }));
                Source::json_schema(json!({"type": "array", "items": item, "minItems": 60}).to_string())
            }
            2 => {
                let step = closed(json!({"explanation": {"type": "string", "maxLength": 60}, "next": {"anyOf": [{"$ref": "#/$defs/step"}, {"type": "null"}]}}));
                let steps = json!({"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 60});
                Source::json_schema(json!({"$defs": {"step": step}, "type": "object", "properties": {format!("steps_{n}"): steps}, "required": [format!("steps_{n}")]}).to_string())
            }
            _ if n % 8 == 3 => Source::regex(format!("(yes|no), because {n}[a-z ,]{{2000,4000}}\\.")),
            _ => Source::lark(format!("start: \"SELECT c{n}\" (\", \" W){{400,}} \" FROM \" W\nW: /[a-z_]{{1,20}}/")),
        })
        .collect()
}

/// Follows one answer in grammars of its own, and times each of its masks.
struct Shadow {
    matcher: Matcher,
    kind: usize,
}

impl Shadow {
    fn follow(&mut self, token: u32, masks: &mut Vec<f64>) {
        if self.matcher.forced().expect("within limits").is_none() {
            let began = thread_time();
            self.matcher.mask().expect("within limits");
            masks.push((thread_time() - began).as_secs_f64() * 1e3);
        }
        self.matcher.consume(token).expect("the engine's token fits");
    }
}

/// Times and counts of the steps of one kind, added up.
#[derive(Default)]
struct Sum {
    step: Duration,
    model: Duration,
    rows: usize,
    tokens: usize,
    steps: usize,
}

impl Sum {
    fn print(&self, name: &str) -> (f64, f64) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3 / self.steps as f64;
        let (step, model) = (ms(self.step), ms(self.model));
        let each = |count: usize| count as f64 / self.steps as f64;
        println!(
            "{name}: a step {step:.1} ms of CPU, model {model:.1}, rest {:.2}; {:.1} rows, {:.1} tokens; a token {:.2} ms",
            step - model,
            each(self.rows),
            each(self.tokens),
            self.step.as_secs_f64() * 1e3 / self.tokens as f64
        );
        (step, step - model)
    }
}

struct Run {
    engine: Engine,
    spent: Arc<Mutex<Spent>>,
    sources: Vec<Source>,
    shadows: Grammars,
    /// Milliseconds of each mask, by kind of grammar.
    masks: [Vec<f64>; KINDS.len()],
    requests: u64,
    vocab: u64,
}

impl Run {
    fn submit(&mut self, number: usize, is_guided: bool) -> u64 {
        let source = &self.sources[number];
        let kind = match source.kind {
            penstock_grammar::Kind::Regex => GuideKind::Regex,
            penstock_grammar::Kind::Lark => GuideKind::Lark,
            _ => GuideKind::JsonSchema,
        };
        let guide = Guide { kind: kind as i32, text: source.text.clone(), begins_after: Vec::new() };
        let request = self.requests;
        self.requests += 1;
        let sampling = Sampling {
            temperature: 1.0,
            seed: request,
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 2000,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Sampling::default()
        };
        self.engine.submit(Generate {
            request,
            prompt: (0..PROMPT).map(|at| ((at * 7 + request * 13) % self.vocab) as u32).collect(),
            choices: vec![ChoiceStart::default()],
            sampling: Some(sampling),
            grammar: is_guided.then_some(guide),
            ..Generate::default()
        });
        request
    }

    /// One round of one kind: prompts, steps that are timed, and the end of all.
    fn round(&mut self, is_guided: bool, sum: &mut Sum) -> Result<(), Box<dyn Error>> {
        let requests: Vec<u64> = (0..BATCH).map(|number| self.submit(number, is_guided)).collect();
        let mut shadows = BTreeMap::new();
        for (number, request) in requests.iter().enumerate().filter(|_| is_guided) {
            let matcher = self.shadows.get(&self.sources[number])?.matcher();
            shadows.insert(*request, Shadow { matcher, kind: number % KINDS.len() });
        }
        let mut timed = 0;
        while timed < STEPS {
            let before = *self.spent.lock().unwrap_or_else(PoisonError::into_inner);
            let began = cpu_time();
            let step = self.engine.step(&cpu_time);
            let took = cpu_time() - began;
            let after = *self.spent.lock().unwrap_or_else(PoisonError::into_inner);
            let prefill = step.batch.as_ref().map_or(0, |batch| batch.prefill_tokens);
            // The first steps compute the prompts.
            if step.outputs.len() == BATCH && after.rows - before.rows < PROMPT as usize * BATCH {
                timed += 1;
                sum.step += took;
                sum.model += after.time - before.time;
                sum.rows += after.rows - before.rows;
                sum.tokens += step.outputs.iter().map(|output| output.tokens.len()).sum::<usize>();
                sum.steps += 1;
            } else if prefill == 0 && step.outputs.iter().any(|output| output.finish.is_some()) {
                return Err(format!(
                    "an answer ended early: {:?}",
                    step.outputs.iter().find_map(|o| o.finish.as_ref())
                )
                .into());
            }
            self.shadow(&step, &mut shadows);
        }
        requests.iter().for_each(|&request| self.engine.cancel(&Cancel { request, choices: Vec::new() }));
        while !self.engine.is_empty() {
            self.engine.step(&cpu_time);
        }
        Ok(())
    }

    fn shadow(&mut self, step: &Step, shadows: &mut BTreeMap<u64, Shadow>) {
        for output in &step.outputs {
            let Some(shadow) = shadows.get_mut(&output.request) else { continue };
            output.tokens.iter().for_each(|token| shadow.follow(token.id, &mut self.masks[shadow.kind]));
        }
    }
}

struct Args {
    folder: std::path::PathBuf,
    tokens: std::path::PathBuf,
    threads: usize,
    path: Path,
    rounds: usize,
}

impl Args {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let (mut threads, mut path, mut rounds, mut files) = (0, Path::Auto, 3, Vec::new());
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--threads" => threads = value()?.parse()?,
                "--rounds" => rounds = value()?.parse()?,
                "--path" => {
                    let name = value()?;
                    let known = CpuDevice::paths_available();
                    path = known.into_iter().find(|path| path.name() == name).ok_or(format!("no path {name}"))?;
                }
                _ if word.starts_with('-') => return Err(format!("unknown option {word}").into()),
                _ => files.push(word.into()),
            }
        }
        let usage = "usage: guided-step FOLDER FILE [--threads N] [--path NAME] [--rounds N]";
        let [folder, tokens] = <[_; 2]>::try_from(files).map_err(|_| usage)?;
        Ok(Self { folder, tokens, threads, path, rounds })
    }
}

/// Vocabulary of the tokens, as wide as the model's.
fn vocabulary(path: &std::path::Path, width: usize) -> Result<Arc<Vocabulary>, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)?;
    let digit = |c: u8| (c as char).to_digit(16).expect("a hexadecimal digit") as u8;
    let bytes = |line: &str| -> Vec<u8> {
        line.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    };
    let tokens: Vec<Vec<u8>> = text.lines().take(width).map(bytes).collect();
    let words = tokens.iter().map(|bytes| TokenText { bytes, is_special: false });
    Ok(Vocabulary::new(words, &[], width)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse()?;
    let checkpoint = Checkpoint::open(&args.folder)?;
    let limits = Limits { rows_max: ROWS_MAX, sampled_max: BATCH };
    let device =
        CpuDevice::new(CpuOptions { threads: args.threads, path: args.path, ..CpuOptions::default() }, limits)?;
    let limits = ModelLimits {
        context_tokens: Some(4096),
        kv: KvBudget::Pages(BATCH * 64),
        rows_max: ROWS_MAX,
        sampled_max: BATCH,
        held: Held::Stored,
        kv_format: KvFormat::Own,
    };
    let model = Model::load(&checkpoint, Box::new(device), limits, &mut |_| {})?;
    let vocab = model.geometry().vocab_size;
    let vocabulary = vocabulary(&args.tokens, vocab)?;
    let sources = sources();
    let mut firsts = Vec::new();
    let shadows = Grammars::new(Arc::clone(&vocabulary), CacheSizes::default());
    for source in &sources {
        // A grammar is compiled on a thread of its own.
        let began = cpu_time();
        shadows.get(source)?.matcher().mask()?;
        firsts.push((cpu_time() - began).as_secs_f64() * 1e3);
    }
    let spent = Arc::<Mutex<Spent>>::default();
    let config = EngineConfig {
        sequences_max: BATCH,
        batch_tokens: ROWS_MAX,
        chunk_tokens: ROWS_MAX,
        prefix_cache: false,
        prefill_seconds_max: 0.0,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Box::new(Timed { model, spent: Arc::clone(&spent) }), &config);
    engine.set_grammars(Arc::new(Grammars::new(vocabulary, CacheSizes::default())));
    let mut run = Run { engine, spent, sources, shadows, masks: <_>::default(), requests: 0, vocab: vocab as u64 };
    let (mut plain, mut guided) = (Sum::default(), Sum::default());
    for _ in 0..args.rounds {
        run.round(false, &mut plain)?;
        run.round(true, &mut guided)?;
    }
    let (step, rest) = plain.print("without grammars");
    let (_, guided_rest) = guided.print("with grammars");
    let state = run.engine.state().guides.unwrap_or_default();
    println!(
        "grammars: {:.2} ms more of a step beside the model, {:.2} % of a step; {} of {} tokens jumped over",
        guided_rest - rest,
        100.0 * (guided_rest - rest) / step,
        state.jumped_tokens,
        guided.tokens
    );
    print("compile and first mask, ms of CPU", &mut firsts);
    print("mask, ms of CPU", &mut run.masks.concat());
    KINDS.iter().zip(&mut run.masks).for_each(|(kind, masks)| print(kind, masks));
    Ok(())
}

fn print(name: &str, values: &mut [f64]) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
    let (mean, count) = (values.iter().sum::<f64>() / values.len() as f64, values.len());
    println!("{name}: mean {mean:.3}, median {:.3}, p99 {:.3}, longest {:.3} of {count}", at(0.5), at(0.99), at(1.0));
}
