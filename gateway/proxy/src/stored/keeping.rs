//! Collection of a response or chat completion beside its stream, and its write into the store when it has ended, off
//! the client's path.

use std::sync::Arc;

use penstock_dialects::openai::{ResponseCollector, StoredChat};
use penstock_store::{ObjectRecord, ResponseRecord, ResponseRoom, StoreError, Tenant};
use penstock_types::{AnswerForm, AnswerMeta, ChatEvent, WholeCollector};

use super::talk::Talk;
use crate::answer::KeepAnswer;
use crate::keeper::Keeper;
use crate::saving::SAVING_MAX;
use penstock_base::error::Failure;
use penstock_upstream::answer_memory::Hold;

/// Object under collection, without the fields that the answer brings.
pub(super) enum Draft {
    /// Response.
    Response {
        /// Record without body and output.
        record: ResponseRecord,
        /// Collector of the answer.
        collector: Box<ResponseCollector>,
        /// True if the response itself is stored, not only its conversation.
        store: bool,
        /// Conversation that takes the items of the response.
        talk: Option<Talk>,
    },
    /// Chat completion.
    Chat {
        /// Record without body.
        record: ObjectRecord,
        /// Parts of the request that the completion repeats.
        chat: StoredChat,
        /// Id of the request, for the completion.
        request_id: String,
        /// Collector of the answer, known once the first event is there.
        collector: Option<Box<dyn WholeCollector>>,
    },
}

/// Object whose answer is complete, ready to be saved.
enum Complete {
    Response { record: Box<ResponseRecord>, store: bool, talk: Option<Talk> },
    Chat(ObjectRecord),
}

/// Response or chat completion whose answer is collected and then saved in the store.
pub(crate) struct Keeping {
    keeper: Arc<Keeper>,
    tenant: Tenant,
    draft: Draft,
    room: ResponseRoom,
    /// Memory charged for the collected answer, until it is saved.
    hold: Hold,
}

impl Keeping {
    pub(super) fn new(keeper: Arc<Keeper>, tenant: Tenant, draft: Draft, room: ResponseRoom, hold: Hold) -> Self {
        Self { keeper, tenant, draft, room, hold }
    }

    fn id(&self) -> &str {
        match &self.draft {
            Draft::Response { record, .. } => record.id.as_str(),
            Draft::Chat { record, .. } => record.id.as_str(),
        }
    }
}

impl KeepAnswer for Keeping {
    fn begin(&mut self, form: &dyn AnswerForm, meta: &AnswerMeta) {
        if let Draft::Chat { collector, .. } = &mut self.draft {
            *collector = Some(form.whole(meta));
        }
    }

    fn cover(&mut self) -> Result<(), Failure> {
        let given = match &self.draft {
            Draft::Response { record, .. } => record.input.len(),
            Draft::Chat { chat, .. } => chat.bytes(),
        };
        self.hold.cover(given + 2 * self.bytes())
    }

    fn give_up(self: Box<Self>, why: &Failure) {
        self.keeper.unsaved(self.id(), &why.message);
    }

    fn event(&mut self, event: &ChatEvent) {
        match &mut self.draft {
            Draft::Response { collector, .. } => collector.event(event),
            Draft::Chat { collector, .. } => collector.iter_mut().for_each(|collector| collector.event(event)),
        }
    }

    fn bytes(&self) -> usize {
        match &self.draft {
            Draft::Response { collector, .. } => WholeCollector::bytes(collector.as_ref()),
            Draft::Chat { collector, .. } => collector.as_ref().map_or(0, |collector| collector.bytes()),
        }
    }

    fn end(self: Box<Self>) {
        let id = self.id().to_owned();
        let Self { keeper, tenant, draft, room, hold } = *self;
        let complete = match draft {
            Draft::Response { record, collector, store, talk } => collector.finished().map(|finished| {
                let (body, output) = (finished.body, finished.output);
                Complete::Response { record: Box::new(ResponseRecord { body, output, ..record }), store, talk }
            }),
            Draft::Chat { record, chat, request_id, collector } => collector
                .and_then(WholeCollector::finish)
                .map(|answer| Complete::Chat(ObjectRecord { body: chat.document(&answer, &request_id), ..record })),
        };
        let Some(complete) = complete else { return };
        let mut ids = vec![id.clone()];
        if let Complete::Response { talk: Some(talk), .. } = &complete {
            ids.push(talk.id().as_str().to_owned());
        }
        let places: Vec<_> = ids.iter().filter_map(|id| keeper.saving.begin(&tenant, id)).collect();
        if places.len() < ids.len() {
            keeper.unsaved(&id, &format!("{SAVING_MAX} answers are being saved already: the store is slow"));
            return;
        }
        tokio::spawn(async move {
            if let Err(error) = complete.save(&keeper, &tenant, room).await {
                keeper.unsaved(&id, &error.to_string());
            }
            drop((places, hold));
        });
    }
}

impl Complete {
    async fn save(self, keeper: &Keeper, tenant: &Tenant, room: ResponseRoom) -> Result<(), StoreError> {
        match self {
            Complete::Response { record, store, talk } => {
                if let Some(talk) = talk
                    && let Err(error) = talk.extend(&record.output).await
                {
                    keeper.unsaved(record.id.as_str(), &format!("its conversation was not extended: {error}"));
                }
                if store { keeper.store.save_response(tenant, *record, room).await } else { Ok(()) }
            }
            Complete::Chat(record) => keeper.store.save_object(tenant, record, Vec::new(), room).await,
        }
    }
}
