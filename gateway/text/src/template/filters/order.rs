//! Filters that sort, group and compare.

use std::rc::Rc;

use crate::template::{
    arguments::Arguments,
    budget::{Run, fault},
    compare,
    machine::Machine,
    value::{Seq, Value, View},
};

impl Machine<'_> {
    pub(super) fn ordered(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        let on = |flag: Option<Value>| flag.is_some_and(|flag| flag.truth());
        match name {
            "dictsort" => {
                let [sensitive, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
                let place = match by.as_ref().map(Value::as_str) {
                    None | Some(Some("key")) => 0,
                    Some(Some("value")) => 1,
                    _ => return fault("You can only sort by either \"key\" or \"value\""),
                };
                let Value::Dict(dict) = value else {
                    return fault(format!("'{} object' has no attribute 'items'", value.kind()));
                };
                let pairs = Value::View(View::Items, dict.clone()).items(&self.budget)?;
                self.sorted(&pairs, Some(&Value::Int(place)), !on(sensitive), on(reverse))
                    .and_then(|list| self.budget.list(list))
            }
            "sort" => {
                let [reverse, sensitive, attribute] = args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
                let items = value.items(&self.budget)?;
                let sorted = self.sorted(&items, attribute.as_ref(), !on(sensitive), on(reverse))?;
                self.budget.list(sorted)
            }
            "unique" => {
                let [sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let (items, folds) = (value.items(&self.budget)?, !on(sensitive));
                let (mut seen, mut out) = (Vec::new(), Vec::new());
                for item in &items.items {
                    let key = self.key(item, attribute.as_ref(), folds)?;
                    let known = Value::List(Rc::new(Seq { items: std::mem::take(&mut seen), nesting: 1 }));
                    let repeated = compare::contains(&self.budget, &known, &key)?;
                    if let Value::List(known) = known {
                        seen = Rc::try_unwrap(known).map(|known| known.items).unwrap_or_default();
                    }
                    if !repeated {
                        seen.push(key);
                        out.push(item.clone());
                    }
                }
                Value::generator(&self.budget, out)
            }
            "groupby" => {
                let [attribute, default, sensitive] = args.bind(name, ["attribute", "default", "case_sensitive"], 1)?;
                self.groups(value, attribute.as_ref(), default.as_ref(), !on(sensitive))
            }
            _ => {
                let [sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let items = value.items(&self.budget)?;
                let mut best: Option<(Value, &Value)> = None;
                for item in &items.items {
                    let key = self.key(item, attribute.as_ref(), !on(sensitive.clone()))?;
                    let better = match &best {
                        None => true,
                        Some((other, _)) if name == "min" => {
                            compare::order(&self.budget, &key, other, "<")?.is_some_and(std::cmp::Ordering::is_lt)
                        }
                        Some((other, _)) => {
                            compare::order(&self.budget, &key, other, ">")?.is_some_and(std::cmp::Ordering::is_gt)
                        }
                    };
                    if better {
                        best = Some((key, item));
                    }
                }
                Ok(best.map_or_else(
                    || Value::undefined("No aggregated item, sequence was empty."),
                    |(_, item)| item.clone(),
                ))
            }
        }
    }

    fn key(&mut self, item: &Value, attribute: Option<&Value>, folds: bool) -> Run<Value> {
        let key = self.path(item, attribute, None)?;
        match &key {
            Value::Str(text) if folds => self.budget.text(text.to_lowercase()),
            _ => Ok(key),
        }
    }

    /// Items in the order of their values at `attribute`: of several, where commas separate names.
    fn sorted(&mut self, items: &Seq, attribute: Option<&Value>, folds: bool, reverse: bool) -> Run<Vec<Value>> {
        let mut keyed = Vec::with_capacity(items.items.len());
        for item in &items.items {
            let key = match attribute {
                Some(Value::Str(names)) if names.contains(',') => {
                    let mut keys = Vec::new();
                    for name in names.split(',') {
                        keys.push(self.key(item, Some(&Value::Str(name.into())), folds)?);
                    }
                    self.budget.tuple(keys)?
                }
                _ => self.key(item, attribute, folds)?,
            };
            keyed.push((key, item.clone()));
        }
        compare::sort_by_key(&self.budget, keyed, reverse)
    }

    fn groups(&mut self, value: &Value, by: Option<&Value>, default: Option<&Value>, folds: bool) -> Run<Value> {
        let items = value.items(&self.budget)?;
        let mut keyed = Vec::new();
        for item in &items.items {
            let key = self.path(item, by, default)?;
            let folded = match &key {
                Value::Str(text) if folds => self.budget.text(text.to_lowercase())?,
                _ => key.clone(),
            };
            keyed.push((folded.clone(), self.budget.tuple(vec![folded, key, item.clone()])?));
        }
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        for entry in compare::sort_by_key(&self.budget, keyed, false)? {
            let Value::Tuple(entry) = entry else { continue };
            let [folded, key, item] = &entry.items[..] else { continue };
            match groups.last_mut() {
                Some((last, _, members)) if compare::equal(&self.budget, last, folded)? => members.push(item.clone()),
                _ => groups.push((folded.clone(), key.clone(), vec![item.clone()])),
            }
        }
        let pairs = groups.into_iter().map(|(_, key, members)| {
            let members = self.budget.list(members)?;
            self.budget.tuple(vec![key, members])
        });
        let pairs = pairs.collect::<Run<_>>()?;
        self.budget.list(pairs)
    }
}
