//! Statements of one transaction in flight together: sent one after the other without waiting for answers, which the
//! server gives in that order. When one fails, those behind it fail because of it; what is reported is what failed.

use std::future::Future;

use futures_util::future::join;
use tokio_postgres::error::SqlState;

use crate::StoreError;
use crate::outbox::OutboxError;

/// An error that may be nothing but the echo of another.
pub trait Echo {
    /// Does it only say that the transaction had failed before?
    fn is_echo(&self) -> bool;
}

impl Echo for StoreError {
    fn is_echo(&self) -> bool {
        self.code() == Some(&SqlState::IN_FAILED_SQL_TRANSACTION)
    }
}
impl Echo for OutboxError {
    fn is_echo(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_echo())
    }
}

/// Both, begun in this order. For more, put one into another: each is boxed, so that what holds them stays small.
pub fn both<A, B, E: Echo>(
    first: impl Future<Output = Result<A, E>>,
    second: impl Future<Output = Result<B, E>>,
) -> impl Future<Output = Result<(A, B), E>> {
    let together = join(Box::pin(first), Box::pin(second));
    async move {
        match together.await {
            (Ok(first), Ok(second)) => Ok((first, second)),
            (Err(first), Err(second)) => Err(if first.is_echo() { second } else { first }),
            (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Failed {
        Really,
        Echoed,
    }
    impl Echo for Failed {
        fn is_echo(&self) -> bool {
            *self == Self::Echoed
        }
    }

    #[tokio::test]
    async fn what_failed_is_told_and_not_its_echo() {
        let fine = || async { Ok::<u8, Failed>(1) };
        let failed = || async { Err::<u8, Failed>(Failed::Really) };
        let echoed = || async { Err::<u8, Failed>(Failed::Echoed) };
        assert_eq!(both(fine(), fine()).await, Ok((1, 1)));
        assert_eq!(both(fine(), failed()).await, Err(Failed::Really));
        assert_eq!(both(failed(), echoed()).await, Err(Failed::Really));
        assert_eq!(both(echoed(), failed()).await, Err(Failed::Really));
        assert_eq!(both(echoed(), both(fine(), failed())).await, Err(Failed::Really));
    }
}
