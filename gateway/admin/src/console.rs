//! Files of the web console, beside the API and open to everybody who reaches the listener: they hold no secret.
//!
//! A link of another site may lead here, so only the host is checked. What the pages ask for passes the gate.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::any;
use penstock_console::{Files, HOME};

use crate::error::ApiError;
use crate::gate::stranger_error;
use crate::origin;
use crate::state::Admin;

/// Routes of the files.
pub(crate) fn routes() -> Router<Admin> {
    let files = Arc::new(Files::default());
    let serve = move |Shared(admin): Shared<Admin>, request: Request| {
        let files = files.clone();
        async move { answer(&admin, &files, request) }
    };
    let page = any(serve);
    Router::new()
        .route("/", page.clone())
        .route("/console", page.clone())
        .route("/console/", page.clone())
        .route("/console/{*file}", page)
}

fn answer(admin: &Admin, files: &Files, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    if let Err(stranger) = origin::check_host(&parts, config) {
        return stranger_error(stranger).into_response();
    }
    if !config.console {
        return ApiError::not_found("The console is off (admin.console).").into_response();
    }
    match parts.uri.path().strip_prefix(HOME) {
        Some(file) => files.answer(&parts.method, file, &parts.headers).map(Body::from),
        None => Redirect::to(HOME).into_response(),
    }
}
