# Databricks notebook source
# MAGIC %md
# MAGIC # Pending transactions
# MAGIC What is pending now by group and age, why it is stuck, and the story of one transaction. The notebook does not
# MAGIC disturb a running job.
# MAGIC
# MAGIC Parameters are widgets on Databricks and options of `python -m notebooks.explore_pending` elsewhere:
# MAGIC
# MAGIC - `config`: a settings file.
# MAGIC - `set`: settings as `group.name=value`, separated by spaces.
# MAGIC - `transaction_id`: the transaction whose story to show. Empty means the oldest pending one.

# COMMAND ----------

from datetime import UTC, datetime

import pandas as pd
from pyspark.sql import functions as F

from halfway.pipelines.resolve.sources import records_since
from halfway.pipelines.storage.delta_tables import stored_tables
from halfway.pipelines.storage.state_reader import stored_states
from halfway.transforms.decoding import DecoderConfig
from halfway.transforms.views import pending_frames, story
from halfway.transforms.views.decoded import decoded_records
from halfway.transforms.views.durations import duration_text
from halfway.transforms.views.totals import counted
from notebooks import charts
from notebooks.page import Page, utc

page = Page.open("explore_pending", "Pending transactions", globals(), transaction_id="")
settings, spark = page.settings, page.spark
kafka = settings.kafka

# COMMAND ----------

# MAGIC %md
# MAGIC ## The state
# MAGIC The job's state after its last committed batch. The low watermark (*horizon*) is the job's time. If it lags far
# MAGIC behind the clock, the job is not running or a partition gets no heartbeats (*ticks*), and nothing falls due.

# COMMAND ----------

# The state is read once, because a running job goes on and all that follows must be of one batch.
states = stored_states(spark, settings.storage).persist()
pending = pending_frames.pending_transactions(states).persist()
facts = pending_frames.state_facts(pending_frames.bucket_facts(states).collect())
horizon = utc(facts.horizon_ms)
if facts.horizon_ms is None:
    page.say("The horizon is not defined, because some partition has no tick yet. Nothing falls due.")
else:
    lag_ms = datetime.now(UTC).timestamp() * 1000 - facts.horizon_ms
    page.say(f"Horizon: {horizon}, {duration_text(abs(lag_ms))} {'behind' if lag_ms >= 0 else 'ahead of'} the clock.")
page.say(f"Pending: {pending.count():,}.")
page.say(f"Verdicts without their half: {facts.waiting:,}. Settled and remembered: {facts.remembered:,}.")
page.say(f"Groups away or behind: {', '.join(sorted(facts.absent_groups)) or 'none'}.")
totals = [(f"  {line.name}" if line.is_reason else line.name, line.total) for line in counted(facts.totals)]
page.table("Counted since the checkpoint began", pd.DataFrame(totals, columns=["what", "count"]))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Pending now

# COMMAND ----------

by_group = pending_frames.ages_by_group(pending).toPandas()
ages = pending_frames.age_histogram(pending).toPandas()
checks = pending_frames.check_histogram(pending).toPandas()
if len(by_group) and facts.horizon_ms is not None:
    page.picture("by_group", charts.pending_by_group(by_group, horizon))
    page.picture("ages", charts.ages(ages, horizon))
    page.picture("checks", charts.checks(checks, horizon))
ages["age"] = [charts.age_text(from_ms) for from_ms in ages["from_ms"]]
page.table("Ages", ages[["age", "transactions"]])
page.table("Checks", checks)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What is stuck, and why
# MAGIC The answers are the ops since the oldest half that was checked.

# COMMAND ----------

[(asked_since_ms,)] = pending.where("check_times > 0").selectExpr("min(start_ms)").collect()
answers = spark.createDataFrame([], pending_frames.ANSWERS)
if kafka.bootstrap_servers and asked_since_ms is not None:
    answers = pending_frames.last_answers(records_since(spark, kafka, [kafka.op_topic], asked_since_ms))
elif asked_since_ms is not None:
    page.say("No Kafka is configured, so the answers are not known. They count as missing.")
stuck = pending_frames.stuck(pending, answers, facts.absent_groups).toPandas()
stuck["oldest"] = [duration_text(max(0, ms)) if pd.notna(ms) else "" for ms in stuck["oldest_age_ms"]]
columns = ["producer_group", "why", "transactions", "oldest", "most_checks", "remark", "example"]
page.table("Why it is pending", stuck[columns].fillna(""))
page.table(
    "What to do", pd.DataFrame([(str(why), way_out) for why, way_out in pending_frames.REMEDIES.items()], columns=["why", "way out"])
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## One transaction's story
# MAGIC Its records in the topics and its rows in the tables, in order of the broker's time.

# COMMAND ----------

oldest = pending.orderBy("start_ms", "transaction_id").select("transaction_id").first()
transaction_id = page.parameters["transaction_id"] or (oldest[0] if oldest else "")
if transaction_id:
    begins, events, said = [], [], pd.DataFrame()
    for row in pending.where(pending["transaction_id"] == transaction_id).collect():
        begins.append(row["start_ms"])
        page.say(f"{transaction_id} is pending; checks so far: {row['check_times']}; due at the horizon {utc(row['next_due_ms'])}.")
    for table, frame in stored_tables(spark, settings.storage).items():
        rows = [row.asDict() for row in story.rows_of(frame, table, transaction_id).collect()]
        begins += [row["half_ms"] for row in rows if row.get("half_ms") is not None]
        events += [story.of_row(row, table) for row in rows]
    if kafka.bootstrap_servers:
        # An op may come before its half, by `transactionTimeOut` at most (R10).
        since_ms = min(begins) - settings.resolution.transactionTimeOut if begins else 0
        records = records_since(spark, kafka, kafka.job_topics(), since_ms)
        found = story.records_of(records, transaction_id).collect()
        events = [story.of_record(row.asDict(), kafka.half_topic, kafka.op_topic) for row in found] + events
        of_id = records.where((F.col("key") == F.lit(transaction_id.encode())) & F.col("topic").isin(kafka.half_topic, kafka.op_topic))
        said = decoded_records(of_id, DecoderConfig.of(settings.resolution, kafka), kafka.op_topic).toPandas()
    shown = [(utc(event.at_ms), event.what, event.detail, event.place) for event in story.in_order(events)]
    page.table(f"The story of {transaction_id}", pd.DataFrame(shown, columns=["at", "what", "detail", "place"]))
    if len(said):
        read = said.sort_values(["at_ms", "partition", "offset"])[["event", "producer_group", "action", "incarnation", "reason", "detail"]]
        page.table("What the job reads in its records", read.convert_dtypes().astype(str).where(read.notna(), ""))
states.unpersist()
pending.unpersist()
page.finish()
