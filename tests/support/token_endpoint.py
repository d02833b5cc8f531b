"""An identity provider for tests: issues signed tokens for a client's id and secret, and publishes its key."""

import base64
import json
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from halfway.pipelines.local.broker import LocalBroker
from halfway.pipelines.local.processes import HOST

AUDIENCE = "kafka"
_LIFE_S = 20
"""Kafka's clients ask for a new token when four fifths of this are over."""


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


class TokenEndpoint:
    """Serves `/token` and `/keys` on loopback."""

    def __init__(self, clients: dict[str, str]) -> None:
        """Begin to serve the clients, a secret for each id."""
        self.clients, self.issued = clients, list[dict[str, str]]()
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self.url = f"http://{HOST}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def keys(self) -> dict[str, Any]:
        """Return the public key as a JSON Web Key Set."""
        numbers = self._key.public_key().public_numbers()
        named = (("n", numbers.n), ("e", numbers.e))
        parts = {name: _encoded(value.to_bytes((value.bit_length() + 7) // 8, "big")) for name, value in named}
        return {"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": "test", **parts}]}

    def token(self, client_id: str, scope: str | None) -> str:
        """Return a token that says who the client is."""
        now_s = int(time.time())
        times = {"iat": now_s, "exp": now_s + _LIFE_S}
        claims = {"sub": client_id, "aud": AUDIENCE, **times, "scope": scope or "all", "jti": str(len(self.issued))}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in ({"alg": "RS256", "kid": "test", "typ": "JWT"}, claims))
        return f"{signed}.{_encoded(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def _answer(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        client_id, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        scope = form.get("scope", [None])[0]
        if form.get("grant_type") != ["client_credentials"] or self.clients.get(client_id) != secret:
            return 401, {"error": "invalid_client"}
        self.issued.append({"client_id": client_id, "scope": scope or ""})
        return 200, {"access_token": self.token(client_id, scope), "token_type": "Bearer", "expires_in": _LIFE_S}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, endpoint.keys())

            def do_POST(self) -> None:
                form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self._send(*endpoint._answer(self.headers.get("Authorization", ""), form))

            def _send(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class TokenBroker(LocalBroker):
    """A local broker whose clients log in with tokens. Those that the endpoint knows may do everything."""

    def __init__(self, directory: Path, endpoint: TokenEndpoint, admin: str) -> None:
        super().__init__(directory)
        self._endpoint, self._admin = endpoint, admin

    def _own_properties(self, port: int, controller_port: int) -> dict[str, str]:
        plain = super()._own_properties(port, controller_port)
        security = "org.apache.kafka.common.security.oauthbearer"
        login = f'{security}.OAuthBearerLoginModule required clientId="{self._admin}" clientSecret="{self._endpoint.clients[self._admin]}";'
        own = {
            "listener.security.protocol.map": "BROKER:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "sasl.mechanism.inter.broker.protocol": "OAUTHBEARER",
            "sasl.oauthbearer.token.endpoint.url": f"{self._endpoint.url}/token",
            "sasl.oauthbearer.jwks.endpoint.url": f"{self._endpoint.url}/keys",
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "listener.name.broker.oauthbearer.sasl.jaas.config": login,
            "listener.name.broker.oauthbearer.sasl.login.callback.handler.class": f"{security}.OAuthBearerLoginCallbackHandler",
            "listener.name.broker.oauthbearer.sasl.server.callback.handler.class": f"{security}.OAuthBearerValidatorCallbackHandler",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": ";".join(f"User:{name}" for name in (*self._endpoint.clients, "ANONYMOUS")),
        }
        return plain | own

    def _client_options(self) -> dict[str, str]:
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": f"{self._endpoint.url}/token",
            "sasl.oauthbearer.client.id": self._admin,
            "sasl.oauthbearer.client.secret": self._endpoint.clients[self._admin],
        }
