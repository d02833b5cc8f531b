"""A transaction that notices, before it writes the row, whether it is still the one that its block began with."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from halfway.clients.sql.drivers import driver_of, errors_of
from halfway.clients.sql.transaction_table import TransactionTable
from halfway.schemas.errors import RolledBackError, SettingsError
from halfway.schemas.headers import LocalTransactionState

OVER = "was over before its block: the block has rolled it back or committed it, or the database has, as after a deadlock"


class SavepointTransaction(ABC):
    """A transaction with a DB-API connection below it."""

    is_ours = True
    """False if the service has begun it, and may begin the next one on the same connection."""

    def flush(self) -> None:  # noqa: B027  # only a session holds statements back
        """Do nothing: statements were executed at once."""

    def is_nested(self) -> bool:
        """Return False: the DB-API does not tell of savepoints."""
        return False

    @abstractmethod
    def abandon(self) -> None:
        """Roll back and let go. Raises nothing, also if the connection is lost."""

    def abandon_after(self, error: BaseException) -> None:
        """Roll back after an error of the block.

        A GeneratorExit tells that a block is freed which a signal has left open. By then a session of the service may
        be in its next transaction.
        """
        if self.is_ours or not isinstance(error, GeneratorExit):
            self.abandon()

    @abstractmethod
    def raw(self) -> Any:
        """Return the DB-API connection that the transaction is in."""

    def errors_as_the_services(self) -> AbstractContextManager[None]:
        """Return a context for statements of our own: their errors are raised as the service's own are."""
        return nullcontext()

    def set_savepoint(self) -> None:
        """Set a savepoint where the block begins: whatever ends the transaction takes it away.

        Raises:
            SettingsError: the connection commits each statement by itself.
        """
        connection = self.raw()
        driver = driver_of(connection)
        if driver.commits_each_statement(connection):
            raise SettingsError("the connection is in autocommit mode, so that what a block writes would not commit together: turn it off")
        with self.errors_as_the_services():
            driver.set_savepoint(connection)

    def release_savepoint(self) -> None:
        """Release the savepoint. The database raises an error if the transaction is over that it was set in."""
        connection = self.raw()
        driver_of(connection).release_savepoint(connection)

    def write_row(self, transaction_id: str, born_at_ms: int) -> None:
        """Write that the transaction commits.

        Raises:
            RolledBackError: a check has taken the place, or the transaction that the block began with is over.
        """
        connection = self.raw()
        driver, errors = driver_of(connection), errors_of(connection)
        try:
            self.release_savepoint()
        except errors.Error as error:
            raise RolledBackError(
                f"transaction {transaction_id} {OVER}. No message becomes readable. Let such an error leave the block, and run it again"
            ) from error
        with self.errors_as_the_services():
            try:
                TransactionTable(driver, connection).insert(transaction_id, LocalTransactionState.COMMIT, born_at_ms)
            except errors.IntegrityError as error:
                raise RolledBackError(
                    f"transaction {transaction_id} was rolled back: a check asked about it before it could commit. Run it again; if this "
                    "happens often, Kafka or the database is slower than the job's transactionTimeOut"
                ) from error
