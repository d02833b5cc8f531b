# Databricks notebook source
# MAGIC %md
# MAGIC # What became of the messages
# MAGIC Rates, latencies from half to commit, and reasons of discards and quarantine over time, from the three tables.
# MAGIC
# MAGIC Parameters are widgets on Databricks and options of `python -m notebooks.audit_resolutions` elsewhere:
# MAGIC
# MAGIC - `config`: a settings file.
# MAGIC - `set`: settings as `group.name=value`, separated by spaces.
# MAGIC - `hours`: how far to look back from the newest outcome. Empty means everything.

# COMMAND ----------

from contextlib import suppress

from pyspark.sql import functions as F

from halfway.pipelines.storage.delta_tables import stored_tables
from halfway.pipelines.storage.state_reader import stored_states
from halfway.schemas.errors import HalfwayError
from halfway.schemas.outcomes import Count, Reason
from halfway.transforms.views import audit, pending_frames
from halfway.transforms.views.durations import duration_text
from notebooks import charts
from notebooks.page import Page, utc

page = Page.open("audit_resolutions", "What became of the messages", globals(), hours="")
settings, spark = page.settings, page.spark
messages, discarded, quarantine = stored_tables(spark, settings.storage).values()

# COMMAND ----------

[(first_ms, last_ms)] = audit.span(audit.outcomes(messages, discarded, quarantine)).collect()
if last_ms is None:
    place = settings.storage.catalog_schema or settings.storage.warehouse
    raise HalfwayError(f"the tables in {place} are empty: run the job, or give the settings of the one whose tables you mean")
# A lost half has the time at which it was sent, days before its loss was noticed.
lost = quarantine.where(F.col("reason") == str(Reason.HALF_LOST)).count()
if lost:
    page.say(f"Lost halves (half_lost), whenever they were sent: {lost:,}.")
if page.parameters["hours"]:
    first_ms = max(first_ms, last_ms - int(float(page.parameters["hours"]) * 3_600_000))
step_ms = audit.step_ms(last_ms - first_ms)
if page.parameters["hours"]:
    first_ms -= first_ms % step_ms  # or else the first step would look like a dip
    messages = audit.since(messages, "committed_at", first_ms)
    discarded = audit.since(discarded, "discarded_at", first_ms)
    quarantine = audit.since(quarantine, "source_timestamp", first_ms)
axis = charts.times(first_ms, last_ms, step_ms)
page.say(f"From {utc(first_ms)} to {utc(last_ms)}, in steps of {duration_text(step_ms)}.")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Rates
# MAGIC Each outcome has its own panel, because discards and quarantined records are rare if all is well. A rollback
# MAGIC leaves nothing in the tables, so their number comes from the job's state, if it can be read here.

# COMMAND ----------

rolled_back = None
with suppress(HalfwayError):
    facts = pending_frames.state_facts(pending_frames.bucket_facts(stored_states(spark, settings.storage)).collect())
    rolled_back = facts.totals[Count.ROLLED_BACK]
rates = audit.rates(audit.outcomes(messages, discarded, quarantine), step_ms).toPandas()
page.picture("rates", charts.rates(rates, axis, rolled_back))
page.table("Outcomes", rates.groupby(["outcome", "reason"], dropna=False)["count"].sum().reset_index().fillna(""))

# COMMAND ----------

# MAGIC %md
# MAGIC ## From half to commit
# MAGIC The latency is the difference of the broker's times of both records. A message that was committed only after a
# MAGIC check took longer than `transactionTimeOut`, or its own immunity. The column *asked* counts those. A message
# MAGIC that was discarded, resent and delivered counts as both.

# COMMAND ----------

latencies = audit.latencies(messages, step_ms).toPandas()
if len(latencies):
    page.picture("latencies", charts.latencies(latencies, axis))
by_group = audit.by_group(messages, discarded).toPandas()
# Where a group has no value, pandas makes floats of a whole column, and NaN of the gap.
page.table("By producer group, times in ms", by_group.convert_dtypes().astype(str).where(by_group.notna(), ""))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Discarded and quarantined, by reason
# MAGIC `docs/rules.md` explains each reason.

# COMMAND ----------

for outcome in ("discarded", "quarantined"):
    if (rates["outcome"] == outcome).any():
        page.picture(outcome, charts.reasons(rates, outcome, axis))
    else:
        page.say(f"Nothing was {outcome}.")
page.finish()
