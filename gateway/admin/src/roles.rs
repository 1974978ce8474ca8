//! Roles that routes need: read from the OpenAPI document, which is made from the routes themselves.
//!
//! Each operation names one role in its `security`; the document that people read and the table that is enforced cannot
//! differ. An operation without a role is a fault that keeps the API from starting: nothing is open by omission.

use std::collections::HashMap;

use http::Method;
use penstock_config::Role;
use serde_json::Value;

/// Name of the security scheme in the document.
pub(crate) const SCHEME: &str = "admin_key";

/// Access to a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Open to every connection.
    Open,
    /// Open to keys of that role and of the roles above.
    Role(Role),
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    /// Id of the operation, such as `cancel_request`.
    pub(crate) id: String,
    pub(crate) method: Method,
    pub(crate) access: Access,
    /// Bounds of its query parameters.
    bounds: Vec<Bound>,
}

/// Bounds of a query parameter beyond its type.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bound {
    name: String,
    length_max: Option<u64>,
    max: Option<u64>,
}

impl Operation {
    /// First parameter of a query that is beyond the document's bounds, and the message about it.
    pub(crate) fn beyond(&self, query: &[(String, String)]) -> Option<(&str, String)> {
        query.iter().find_map(|(name, value)| {
            let bound = self.bounds.iter().find(|bound| bound.name == *name)?;
            let too_long = bound.length_max.filter(|max| value.chars().count() as u64 > *max);
            let too_large = bound.max.filter(|max| value.parse::<u64>().is_ok_and(|number| number > *max));
            let long = too_long.map(|max| format!("{name}: at most {max} characters"));
            long.or_else(|| too_large.map(|max| format!("{name}: at most {max}"))).map(|why| (bound.name.as_str(), why))
        })
    }
}

/// Operations of every route.
#[derive(Debug, Default)]
pub(crate) struct Routes(HashMap<String, Vec<Operation>>);

impl Routes {
    /// Reads the operations from the document.
    ///
    /// # Errors
    /// An operation names no role.
    pub(crate) fn read(document: &Value) -> Result<Self, String> {
        let mut routes = Self::default();
        let paths = document["paths"].as_object().ok_or("the document has no paths")?;
        for (path, item) in paths {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let Ok(method) = Method::from_bytes(method.to_ascii_uppercase().as_bytes()) else { continue };
                if !operation.is_object() {
                    continue;
                }
                let access = access(&operation["security"])
                    .ok_or_else(|| format!("{method} {path} does not say who may use it"))?;
                let id = operation["operationId"].as_str().unwrap_or_default().to_owned();
                let bounds = bounds(&operation["parameters"]);
                routes.0.entry(path.clone()).or_default().push(Operation { id, method, access, bounds });
            }
        }
        Ok(routes)
    }

    /// Operation of `method` at the route with that template; `None`: there is none, for any role.
    pub(crate) fn find(&self, path: &str, method: &Method) -> Option<&Operation> {
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        self.0.get(path)?.iter().find(|operation| operation.method == *method)
    }

    /// Every operation, in order of the paths.
    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<(String, Method, Access)> {
        let mut all: Vec<_> = self
            .0
            .iter()
            .flat_map(|(path, all)| all.iter().map(|one| (path.clone(), one.method.clone(), one.access)))
            .collect();
        all.sort_by(|left, right| (&left.0, left.1.as_str()).cmp(&(&right.0, right.1.as_str())));
        all
    }
}

fn bounds(parameters: &Value) -> Vec<Bound> {
    let queried = parameters.as_array().into_iter().flatten().filter(|parameter| parameter["in"] == "query");
    let bound = |parameter: &Value| Bound {
        name: parameter["name"].as_str().unwrap_or_default().to_owned(),
        length_max: parameter["schema"]["maxLength"].as_u64(),
        max: parameter["schema"]["maximum"].as_u64(),
    };
    queried.map(bound).collect()
}

/// Access of a `security` value: `[{}]` is open, `[{"admin_key": ["ROLE"]}]` asks for a role, all else is `None`.
fn access(security: &Value) -> Option<Access> {
    let [requirement] = security.as_array()?.as_slice() else { return None };
    let requirement = requirement.as_object()?;
    if requirement.is_empty() {
        return Some(Access::Open);
    }
    let [role] = requirement.get(SCHEME)?.as_array()?.as_slice() else { return None };
    Role::parse(role.as_str()?).map(Access::Role)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_operation_without_a_role_is_a_fault() {
        let with = |security: Value| {
            let document = json!({ "paths": { "/x": { "get": { "security": security } } } });
            Routes::read(&document).map(|routes| routes.find("/x", &Method::HEAD).map(|operation| operation.access))
        };
        assert_eq!(with(json!([{}])), Ok(Some(Access::Open)));
        assert_eq!(with(json!([{ "admin_key": ["operator"] }])), Ok(Some(Access::Role(Role::Operator))));
        for wrong in [
            json!(null),
            json!([]),
            json!([{ "admin_key": [] }]),
            json!([{ "admin_key": ["root"] }]),
            json!([{ "other": ["owner"] }]),
            json!([{}, { "admin_key": ["owner"] }]),
        ] {
            assert!(with(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_in_the_document_is_for_nobody() {
        let document = json!({ "paths": { "/x": { "get": { "security": [{}] } } } });
        let routes = Routes::read(&document).expect("valid");
        assert_eq!((routes.find("/x", &Method::POST), routes.find("/y", &Method::GET)), (None, None));
    }
}
