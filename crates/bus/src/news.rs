//! News within a process: who waits for another worker's commit looks again at once, instead of at the end of a pause.
//! Nothing depends on them. Between processes there are none, and one that comes while nobody listens is gone: the
//! pause ends by itself.

use std::sync::Arc;

use tokio::sync::Notify;

/// One kind of news, and everybody who waits for it. Cloning is cheap.
#[derive(Debug, Clone, Default)]
pub struct News {
    told: Arc<Notify>,
}

impl News {
    /// Wakes everybody who waits now.
    pub fn tell(&self) {
        self.told.notify_waiters();
    }

    /// Waits for what is told from now on.
    pub async fn heard(&self) {
        self.told.notified().await;
    }

    /// The same for who must look once more between saying that it waits and waiting.
    pub(crate) fn notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.told.notified()
    }
}
