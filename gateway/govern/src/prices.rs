//! Prices of models: a table of list prices by name, and the arithmetic.
//!
//! The table is data (`configs/prices.toml`), embedded, and can be replaced by a file of the operator's. A name is found by exact match or
//! by the longest pattern.

use penstock_types::ServiceTier;
use serde::Deserialize;

/// Text of the price table that is embedded in the program, in TOML.
pub const EMBEDDED: &str = include_str!("../../../configs/prices.toml");

/// Prices of one model, in dollars per million tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Price {
    /// Prompt tokens that come from no cache.
    pub input: f64,
    /// Dollars per million prompt tokens that are read from a cache.
    pub cached_input: f64,
    /// Dollars per million prompt tokens that are written to a cache.
    pub cache_write: f64,
    /// Dollars per million output tokens, reasoning included.
    pub output: f64,
    /// Multiples of the prices above in other service tiers.
    pub tiers: Tiers,
}

/// Prices of service tiers, as multiples of the standard prices; 0: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tiers {
    /// Multiple of the tiers `flex` and `batch`.
    pub flex: f64,
    /// Multiple of the tier `priority`, and of every tier whose name is unknown.
    pub priority: f64,
}

impl Price {
    /// Returns true if the price of a tier is known, or known to be at most the standard price.
    pub fn knows(&self, tier: ServiceTier) -> bool {
        tier != ServiceTier::Priority || self.tiers.priority > 0.0
    }

    /// Prices in a tier; a tier without a known multiple has the standard prices.
    pub fn at(&self, tier: ServiceTier) -> Self {
        let times = match tier {
            ServiceTier::Standard => 1.0,
            ServiceTier::Flex => self.tiers.flex,
            ServiceTier::Priority => self.tiers.priority,
        };
        let times = if times > 0.0 { times } else { 1.0 };
        Self {
            input: self.input * times,
            cached_input: self.cached_input * times,
            cache_write: self.cache_write * times,
            output: self.output * times,
            tiers: self.tiers,
        }
    }

    /// Dollars for token counts; `cached` and `written` are parts of `prompt`.
    pub fn usd(&self, prompt: u64, cached: u64, written: u64, completion: u64) -> f64 {
        let plain = prompt.saturating_sub(cached).saturating_sub(written);
        let sum = plain as f64 * self.input
            + cached as f64 * self.cached_input
            + written as f64 * self.cache_write
            + completion as f64 * self.output;
        sum / 1e6
    }
}

/// Facts of the table about one model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelFacts {
    /// Prices of the model, in dollars per million tokens.
    pub price: Price,
    /// Context length of the model in tokens; 0: unknown.
    pub context_tokens: u32,
}

/// Table of models with their prices and context lengths.
#[derive(Clone, Debug, Default)]
pub struct Prices {
    /// Patterns of model names with their facts, most specific pattern first.
    rows: Vec<(String, ModelFacts)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    price: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    models: Vec<String>,
    input: f64,
    cached_input: Option<f64>,
    cache_write: Option<f64>,
    output: f64,
    flex: Option<f64>,
    priority: Option<f64>,
    #[serde(default)]
    context_tokens: u32,
}

impl Prices {
    /// Reads a table.
    ///
    /// # Errors
    /// The fault, with its line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut rows = Vec::new();
        for row in file.price {
            let all = [Some(row.input), row.cached_input, row.cache_write, Some(row.output), row.flex, row.priority];
            if all.into_iter().flatten().any(|price| !(0.0..=1e6).contains(&price)) {
                return Err(format!("prices of {:?}: must be from 0 to 1000000", row.models));
            }
            let price = Price {
                input: row.input,
                cached_input: row.cached_input.unwrap_or(row.input),
                cache_write: row.cache_write.unwrap_or(row.input),
                output: row.output,
                tiers: Tiers { flex: row.flex.unwrap_or_default(), priority: row.priority.unwrap_or_default() },
            };
            let facts = ModelFacts { price, context_tokens: row.context_tokens };
            rows.extend(row.models.into_iter().map(|pattern| (pattern, facts)));
        }
        rows.sort_by_key(|(pattern, _)| {
            let stars = pattern.matches('*').count();
            (stars > 0, std::cmp::Reverse(pattern.len() - stars))
        });
        if let Some(pair) = rows.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(format!("{:?} has two prices", pair[0].0));
        }
        Ok(Self { rows })
    }

    /// Facts of a model: by its full name, else by the part behind its last `/`.
    pub fn find(&self, model: &str) -> Option<ModelFacts> {
        let by = |name: &str| self.rows.iter().find(|(pattern, _)| matches(pattern, name)).map(|(_, facts)| *facts);
        by(model).or_else(|| by(model.rsplit_once('/')?.1))
    }

    /// Number of patterns of model names in the table.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns true if the table has no patterns.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Returns true if `name` matches `pattern`, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("gpt-4o", "gpt-4o", true),
            ("gpt-4o", "gpt-4o-mini", false),
            ("gpt-4o-*", "gpt-4o-2024-11-20", true),
            ("gpt-4o-*", "gpt-4o", false),
            ("*sonnet-4*", "anthropic.claude-sonnet-4-v1:0", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_most_specific_row_counts() {
        let row = |models: &str, input: f64| format!("[[price]]\nmodels = [{models}]\ninput = {input}\noutput = 1.0\n");
        let text = row("\"m*\"", 1.0) + &row("\"m-big*\"", 2.0) + &row("\"m-big-7\"", 3.0);
        let prices = Prices::parse(&text).expect("valid");
        let input = |name: &str| prices.find(name).map(|facts| facts.price.input);
        assert_eq!(
            (input("m-1"), input("m-big-6"), input("m-big-7"), input("x")),
            (Some(1.0), Some(2.0), Some(3.0), None)
        );
        assert_eq!(input("org/m-1"), Some(1.0), "organisations in front do not matter");
        assert!(Prices::parse(&(row("\"a\"", 1.0) + &row("\"a\"", 2.0))).is_err());
        assert!(Prices::parse(&row("\"a\"", -1.0)).is_err());
    }

    #[test]
    fn parts_of_a_prompt_have_their_own_prices() {
        let price = Price { input: 3.0, cached_input: 0.3, cache_write: 3.75, output: 15.0, ..Price::default() };
        let usd = price.usd(1000, 600, 100, 200);
        assert!((usd - (300.0 * 3.0 + 600.0 * 0.3 + 100.0 * 3.75 + 200.0 * 15.0) / 1e6).abs() < 1e-12, "{usd}");
    }

    #[test]
    fn tiers_are_multiples() {
        let text = "[[price]]\nmodels = [\"m\"]\ninput = 2.0\noutput = 8.0\npriority = 1.5\n";
        let price = Prices::parse(text).expect("valid").find("m").expect("there").price;
        let of = |tier| (price.knows(tier), price.at(tier).input, price.at(tier).output);
        assert_eq!(of(ServiceTier::Standard), (true, 2.0, 8.0));
        assert_eq!(of(ServiceTier::Priority), (true, 3.0, 12.0));
        assert_eq!(of(ServiceTier::Flex), (true, 2.0, 8.0), "of which nobody said what it costs: no less");
        let price = Price { tiers: Tiers::default(), ..price };
        assert!(!price.knows(ServiceTier::named("anything")) && price.knows(ServiceTier::named("auto")));
    }

    /// Prices as the provider's page lists them, which the multiples of the table must give; 0: it lists none.
    #[test]
    fn tiers_of_the_embedded_table_cost_what_their_provider_says() {
        let prices = Prices::parse(EMBEDDED).expect("valid");
        for (model, priority, flex) in [
            ("gpt-5.5", [12.5, 1.25, 75.0], [2.5, 0.25, 15.0]),
            ("gpt-5.4", [5.0, 0.5, 30.0], [1.25, 0.125, 7.5]),
            ("gpt-5.4-mini", [1.5, 0.15, 9.0], [0.375, 0.0375, 2.25]),
            ("gpt-5.2", [3.5, 0.35, 28.0], [0.875, 0.0875, 7.0]),
            ("gpt-5.2-codex", [0.0; 3], [0.0; 3]),
            ("gpt-5.1", [2.5, 0.25, 20.0], [0.625, 0.0625, 5.0]),
            ("gpt-5.1-codex", [2.5, 0.25, 20.0], [0.0; 3]),
            ("gpt-5.1-codex-max", [0.0; 3], [0.0; 3]),
            ("gpt-5", [2.5, 0.25, 20.0], [0.625, 0.0625, 5.0]),
            ("gpt-5-mini", [0.45, 0.045, 3.6], [0.125, 0.0125, 1.0]),
            ("gpt-5-nano", [0.0; 3], [0.025, 0.0025, 0.2]),
            ("gpt-4.1", [3.5, 0.875, 14.0], [0.0; 3]),
            ("gpt-4.1-mini", [0.7, 0.175, 2.8], [0.0; 3]),
            ("gpt-4.1-nano", [0.2, 0.05, 0.8], [0.0; 3]),
            ("gpt-4o", [4.25, 2.125, 17.0], [0.0; 3]),
            ("gpt-4o-2024-05-13", [8.75, 8.75, 26.25], [0.0; 3]),
            ("gpt-4o-mini", [0.25, 0.125, 1.0], [0.0; 3]),
            ("o3", [3.5, 0.875, 14.0], [1.0, 0.25, 4.0]),
            ("o4-mini", [2.0, 0.5, 8.0], [0.55, 0.1375, 2.2]),
            ("o3-mini", [0.0; 3], [0.0; 3]),
        ] {
            let price = prices.find(model).unwrap_or_else(|| panic!("{model}")).price;
            let parts = |price: Price| [price.input, price.cached_input, price.output];
            let standard = parts(price);
            assert_eq!(price.knows(ServiceTier::Priority), priority[0] > 0.0, "{model}");
            let flex = if flex[0] > 0.0 { flex } else { standard };
            for (tier, listed) in [(ServiceTier::Priority, priority), (ServiceTier::Flex, flex)] {
                let made = parts(price.at(tier));
                let is_near = |(made, listed): (f64, f64)| listed == 0.0 || (made / listed - 1.0).abs() < 1e-4;
                assert!(made.into_iter().zip(listed).all(is_near), "{model} {tier:?}: {made:?} {listed:?}");
            }
        }
    }

    #[test]
    fn the_embedded_table_knows_the_names_of_other_clouds_and_no_prices_of_speech() {
        let prices = Prices::parse(EMBEDDED).expect("valid");
        let input = |name: &str| prices.find(name).map(|facts| facts.price.input);
        for name in ["claude-opus-4-20250514", "claude-opus-4@20250514", "us.anthropic.claude-opus-4-20250514-v1:0"] {
            assert_eq!(input(name), Some(15.0), "{name}");
        }
        assert_eq!(input("claude-opus-4-5@20251101"), Some(5.0));
        assert_eq!(input("gemini-2.5-pro-preview-06-05"), Some(1.25));
        assert_eq!(input("gemini-2.5-flash-preview-09-2025"), Some(0.3));
        assert_eq!(input("gemini-2.5-flash-lite-preview-06-17"), Some(0.1));
        for name in ["gemini-2.5-pro-preview-tts", "gemini-2.5-flash-preview-tts"] {
            assert_eq!(input(name), None, "{name}");
        }
    }

    #[test]
    fn the_embedded_table_is_valid() {
        let prices = Prices::parse(EMBEDDED).expect("valid");
        for model in ["gpt-4o-mini", "claude-sonnet-4-20250514", "gemini-2.5-flash", "deepseek-chat"] {
            let facts = prices.find(model).unwrap_or_else(|| panic!("{model}"));
            assert!(
                facts.price.input > 0.0 && facts.price.output > facts.price.cached_input && facts.context_tokens > 0
            );
        }
    }
}
