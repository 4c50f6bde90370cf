"""A sign-up page that writes its mails into the outbox: the user and the mail are one transaction.

    engine outbox init outbox
    python app.py                        http://127.0.0.1:5000
    engine serve-outbox --campaign outbox

The table lies in the application's own database (`store = "sqlite:../shop.sqlite"` in outbox/campaign.toml): when the
user's row is rolled back, no mail goes out; when it is committed, the mail will, whatever crashes.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from pathlib import Path

from flask import Flask, g, redirect, render_template_string, request, url_for
from werkzeug.wrappers import Response

from engine.outbox import Mail, insert

DATABASE = Path(os.environ.get("SHOP_DATABASE", "shop.sqlite"))
PAGE = """
<!doctype html><title>Sign up</title>
<h1>News from the shop</h1>
{% if told %}<p>{{ told }}</p>{% endif %}
<form method="post">
  <label>Name <input name="name" required></label>
  <label>E-mail <input name="email" type="email" required></label>
  <button>Sign up</button>
</form>
"""

app = Flask(__name__)


def database() -> sqlite3.Connection:
    """This request's connection."""
    if "database" not in g:
        g.database = sqlite3.connect(DATABASE)
        g.database.execute(
            "CREATE TABLE IF NOT EXISTS users (id INTEGER PRIMARY KEY, name TEXT, email TEXT UNIQUE,"
            " token TEXT, confirmed INTEGER NOT NULL DEFAULT 0)"
        )
    connection: sqlite3.Connection = g.database
    return connection


@app.teardown_appcontext
def close(_: BaseException | None) -> None:
    if (connection := g.pop("database", None)) is not None:
        connection.close()


@app.get("/")
def page() -> str:
    return render_template_string(PAGE, told=request.args.get("told"))


@app.post("/")
def sign_up() -> Response:
    name, email, token = request.form["name"], request.form["email"], secrets.token_urlsafe(16)
    connection = database()
    with connection:  # one transaction: the user and the mail, or neither
        connection.execute(
            "INSERT INTO users (name, email, token) VALUES (?, ?, ?) ON CONFLICT (email) DO NOTHING",
            (name, email, token),
        )
        (user, token) = connection.execute("SELECT id, token FROM users WHERE email = ?", (email,)).fetchone()
        insert(
            connection,
            Mail(
                address=email,
                priority=1,
                template="welcome",
                fields={"name": name, "confirm_url": url_for("confirm", token=token, _external=True)},
                idempotency_key=f"welcome-{user}",  # two clicks on the button are one mail
            ),
        )
    return redirect(url_for("page", told="Look into your mail."))  # type: ignore[return-value]


@app.get("/confirm/<token>")
def confirm(token: str) -> str:
    with database() as connection:
        found = connection.execute("UPDATE users SET confirmed = 1 WHERE token = ?", (token,)).rowcount
    return "Welcome!" if found else "This link is not known."


if __name__ == "__main__":
    app.run()
