//! OpenAPI document: the routes' own parts, and the parts that hold for all routes.

use serde_json::{Value, json};
use utoipa::OpenApi;

use crate::error::{ErrorBody, ErrorDetail};
use crate::roles::SCHEME;

/// Head of the document; the routes add themselves.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "penstock admin API",
        description = "State and control of a penstock gateway. Every operation names the role that its key needs: viewer, operator or owner; each role includes the rights of those before it.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    components(schemas(ErrorBody, ErrorDetail))
)]
pub(crate) struct Head;

/// Refusals that any operation may answer with; those for a missing role are left out where no key is needed.
const REFUSALS: [(&str, &str, bool); 10] = [
    ("400", "A parameter or the body does not match this document.", false),
    ("401", "No admin key, or an unknown one.", true),
    ("403", "The key's role may not do this, or the Host or Origin is not accepted.", false),
    ("404", "No such object.", false),
    ("408", "The body came too slowly.", false),
    ("413", "The body is too large.", false),
    ("415", "The media type of the body is not supported.", false),
    ("429", "Too many wrong keys from this address.", true),
    ("500", "An internal error; the log has the reason.", false),
    ("503", "A part that the operation needs is not available now.", false),
];

/// Document of the routes, with the parts that hold for all.
pub(crate) fn complete(routes: &utoipa::openapi::OpenApi) -> Result<Value, String> {
    let mut document = serde_json::to_value(routes).map_err(|error| error.to_string())?;
    document["components"]["securitySchemes"][SCHEME] = json!({
        "type": "http",
        "scheme": "bearer",
        "description": "A key of [[admin_keys]], or the one in STATE_DIR/admin.key.",
    });
    document["servers"] = json!([{ "url": "/", "description": "This gateway" }]);
    let paths = document["paths"].as_object_mut().ok_or("the document has no paths")?;
    for operation in paths.values_mut().filter_map(Value::as_object_mut).flat_map(|item| item.values_mut()) {
        if !operation.is_object() {
            continue;
        }
        let open = operation["security"] == json!([{}]);
        for (status, why, keyed) in REFUSALS {
            let responses = &mut operation["responses"];
            if responses.get(status).is_none() && !(open && keyed) {
                responses[status] = json!({
                    "description": why,
                    "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
                });
            }
        }
        // Said by the reader of the head, without a body.
        for (status, why) in [("414", "The URL is too long."), ("431", "The head is too large.")] {
            operation["responses"][status] = json!({ "description": why });
        }
    }
    Ok(document)
}
