"""What alembic runs around the migrations: the connection and its transaction are the caller's."""

from alembic import context

from service.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
