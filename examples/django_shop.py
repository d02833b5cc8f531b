"""An order service with Django, in one file: `python -m examples.django_shop runserver`.

It writes an order and publishes it, both or neither. Halfway's checks are answered from the database: no code here.
"""

import json
import os
import sys

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connections, models
from django.http import HttpRequest, JsonResponse
from django.urls import path

from halfway import SqlTransactions, TransactionProducer, load_settings

settings.configure(
    DEBUG=True,
    SECRET_KEY="an example needs none that is secret",
    ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "django_shop.db")}},
)
django.setup()
producer = TransactionProducer(load_settings().kafka, "order-site", SqlTransactions(connections["default"]))
producer.start()  # Answers checks from now on, also before the first order. A server that forks does this in each worker.


class Order(models.Model):
    """A customer's order."""

    item = models.CharField(max_length=40)

    class Meta:
        """Belongs to no installed app, because all is in one file."""

        app_label = "shop"


def place(request: HttpRequest, item: str) -> JsonResponse:  # noqa: ARG001  # Django's signature
    """Place an order."""
    with producer.transaction() as tx:
        Order.objects.create(item=item)
        tx.send("orders", json.dumps({"item": item, "quantity": 1}).encode(), tags="placed")
    return JsonResponse({"transaction": tx.transaction_id})


urlpatterns = [path("orders/<str:item>", place)]

if Order._meta.db_table not in connections["default"].introspection.table_names():  # a project has migrations for it
    with connections["default"].schema_editor() as editor:
        editor.create_model(Order)

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
