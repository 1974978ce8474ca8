//! Batches and files that the store keeps for all keys: listed, shown, cancelled and deleted.

use anyhow::Context;
use hyper::Method;

use super::arguments::{Batches, BatchesCommand, BatchesFilter, Files, FilesCommand, FilesFilter};
use super::client::{Client, encoded};
use super::columns::{BATCHES, FILES};
use super::commands::{Show, all};

/// Lists batches, shows one, or cancels some.
pub(super) async fn batches(client: &Client, asked: &Batches, show: Show) -> anyhow::Result<()> {
    let listed = BatchesCommand::List(asked.filter.clone());
    match asked.command.as_ref().unwrap_or(&listed) {
        BatchesCommand::List(BatchesFilter { key, open }) => {
            let filter = [("key", key.clone()), ("open", open.then(|| "true".to_owned()))];
            show.rows(&all(client, "/admin/v1/batches", &filter).await?, BATCHES, "no batches");
        }
        BatchesCommand::Show { id } => show.one(&client.get(&format!("/admin/v1/batches/{}", encoded(id))).await?),
        BatchesCommand::Cancel { ids } => {
            for id in ids {
                let path = format!("/admin/v1/batches/{}/cancel", encoded(id));
                let batch = client.change(Method::POST, &path, None, None).await.with_context(|| id.clone())?;
                if show.json {
                    show.one(&batch);
                } else {
                    println!("{id} is {}", super::value(&batch, "status"));
                }
            }
        }
    }
    Ok(())
}

/// Lists files, shows one, or deletes some.
pub(super) async fn files(client: &Client, asked: &Files, show: Show) -> anyhow::Result<()> {
    let one = |id: &str| format!("/admin/v1/files/{}", encoded(id));
    let listed = FilesCommand::List(asked.filter.clone());
    match asked.command.as_ref().unwrap_or(&listed) {
        FilesCommand::List(FilesFilter { key }) => {
            let filter = [("key", key.clone())];
            show.rows(&all(client, "/admin/v1/files", &filter).await?, FILES, "no files");
        }
        FilesCommand::Show { id } => show.one(&client.get(&one(id)).await?),
        FilesCommand::Delete { ids } => {
            for id in ids {
                let done = client.change(Method::DELETE, &one(id), None, None).await.with_context(|| id.clone())?;
                if show.json {
                    show.one(&done);
                } else {
                    println!("{id} is deleted");
                }
            }
        }
    }
    Ok(())
}
