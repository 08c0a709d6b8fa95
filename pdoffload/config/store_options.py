"""The keys of `store_config`, the table inside an obj tier's table. See `options` for the rest."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdoffload.config.reading import about


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which store, and how to get in. No way of printing it shows a credential."""

    bucket: Annotated[
        str,
        Meta(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z"),
        about(
            "Bucket, or with AZURE_BLOB the container. It has to exist.",
            allowed="3 to 63 small letters, digits, `-` and `.`",
        ),
    ]
    endpoint_override: Annotated[
        str,
        about(
            "Where the store listens. Empty: AWS itself. With AZURE_BLOB the URL of the account.",
            allowed="host:port, http://host:port or https://host:port, or empty",
        ),
    ] = ""
    scheme: Annotated[
        Literal["http", "https"],
        about("Used where `endpoint_override` names none; must agree with one that does."),
    ] = "http"
    access_key: Annotated[str, about("Empty: the SDK's own chain of credentials.", secret=True)] = (
        ""
    )
    secret_key: Annotated[str, about("Goes with `access_key`.", secret=True)] = ""
    session_token: Annotated[
        str, about("Of temporary credentials, besides the other two.", secret=True)
    ] = ""
    region: Annotated[
        str, Meta(max_length=63), about("Region of the bucket. Empty: the SDK's own default.")
    ] = ""
    ca_bundle: Annotated[
        str,
        about("File with the certificates of authorities to trust. Empty: the system's."),
    ] = ""
    connection_string: Annotated[
        str,
        about(
            "With AZURE_BLOB: account, key and endpoint in one, instead of the keys above. Without it "
            "Azure's own chain of credentials is used with `endpoint_override`.",
            secret=True,
            own=True,
        ),
    ] = ""

    def __repr__(self) -> str:
        return f"<StoreConfig bucket {self.bucket!r} at {self.endpoint_override or 'AWS'}>"
