"""How far a worker's load is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("workers", sa.Column("loading", sa.JSON(none_as_null=True)))
