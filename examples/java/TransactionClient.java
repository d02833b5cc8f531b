import static java.nio.charset.StandardCharsets.UTF_8;

import java.nio.ByteBuffer;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.UUID;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.function.Function;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.InvalidRecordException;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.AuthorizationException;
import org.apache.kafka.common.errors.InvalidTopicException;
import org.apache.kafka.common.errors.RecordTooLargeException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.Headers;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A client in Java that follows docs/contract.md: it sends the half, runs the local transaction, sends the op, and
 * answers checks.
 *
 * <p>It needs Kafka's client alone:
 * {@code java -cp 'kafka-clients.jar:slf4j-api.jar' TransactionClient.java SERVERS HALF OP CHECK [PREFIX]}. The ids begin
 * with PREFIX, a new one by default: an id must never be used again.
 *
 * <p>Where the group has a key, it is in the environment as {@code HALFWAY_KEY}, and the name of the cluster as {@code
 * HALFWAY_CLUSTER}. The client then signs halves and ops, and skips checks that the job has not signed.
 */
public final class TransactionClient implements AutoCloseable {
    public enum State { COMMIT, ROLLBACK, UNKNOWN }

    /** A body of 4 MiB, its key and its headers. Kafka's client takes 1 MiB by default. */
    private static final int MAX_RECORD_BYTES = 5 * 1024 * 1024;
    private static final int REMEMBERED_VERDICTS = 100_000;
    private static final long SIGNED_WINDOW_MS = 5 * 60_000;

    private final String group;
    private final String halfTopic;
    private final String opTopic;
    private final String checkTopic;
    private final String signingKey = System.getenv("HALFWAY_KEY");
    private final String cluster = System.getenv("HALFWAY_CLUSTER");
    private final KafkaProducer<byte[], byte[]> producer;
    private final KafkaConsumer<byte[], byte[]> checks;
    /** The latest verdicts by incarnation and id, so that a check of one needs no look-up. UNKNOWN is no verdict. */
    private final Map<String, State> verdicts =
            Collections.synchronizedMap(
                    new LinkedHashMap<>() {
                        @Override
                        protected boolean removeEldestEntry(Map.Entry<String, State> eldest) {
                            return size() > REMEMBERED_VERDICTS;
                        }
                    });

    public TransactionClient(String servers, String group, String halfTopic, String opTopic, String checkTopic) {
        if (signingKey != null && cluster == null) {
            throw new IllegalArgumentException("HALFWAY_KEY needs HALFWAY_CLUSTER, the kafka.signing.cluster of the job");
        }
        this.group = group;
        this.halfTopic = halfTopic;
        this.opTopic = opTopic;
        this.checkTopic = checkTopic;
        // The default partitioner is murmur2 of the key, as the contract requires. Each call waits for its half, so a
        // record waits for those of other threads for 2 ms only.
        producer = new KafkaProducer<>(
                Map.of("bootstrap.servers", servers, "acks", "all", "enable.idempotence", true, "linger.ms", 2,
                        "max.request.size", MAX_RECORD_BYTES),
                new ByteArraySerializer(), new ByteArraySerializer());
        checks = new KafkaConsumer<>(
                Map.of("bootstrap.servers", servers, "group.id", "txn-check-" + group,
                        "enable.auto.commit", false, "auto.offset.reset", "earliest"),
                new ByteArrayDeserializer(), new ByteArrayDeserializer());
        makeKnown();
        checks.subscribe(List.of(checkTopic), new CommitsWhereItBegins());
    }

    /** Commits a position where there is none. To join takes seconds, and this process may have ended by then. */
    private void makeKnown() {
        var limit = Duration.ofSeconds(5);
        var begins = new HashMap<TopicPartition, OffsetAndMetadata>();
        try {
            checks.partitionsFor(checkTopic, limit).forEach(
                    each -> begins.put(new TopicPartition(checkTopic, each.partition()), new OffsetAndMetadata(0)));
            checks.committed(begins.keySet(), limit).forEach((partition, committed) -> {
                if (committed != null) {
                    begins.remove(partition);
                }
            });
            checks.commitSync(begins, limit);
        } catch (KafkaException error) {
            // Another instance is a member, or Kafka is away: CommitsWhereItBegins follows.
        }
    }

    /** Sends a half, runs the local transaction once the half is stored, and sends its outcome as an op. */
    public State sendInTransaction(String id, String topic, byte[] body, Function<String, State> localTransaction)
            throws ExecutionException, InterruptedException {
        var half = new ProducerRecord<>(halfTopic, id.getBytes(UTF_8), body);
        half.headers().add("REAL_TOPIC", topic.getBytes(UTF_8)).add("PGROUP", group.getBytes(UTF_8));
        long signedAt = System.currentTimeMillis();
        if (signingKey != null) {
            half.headers().add("SIGNED_AT", Long.toString(signedAt).getBytes(UTF_8));
            sign(half);
        }
        Header signature = half.headers().lastHeader("SIGNATURE");
        try {
            RecordMetadata stored = producer.send(half).get();
            if (signingKey != null && Math.abs(stored.timestamp() - signedAt) > SIGNED_WINDOW_MS) {
                producer.send(op(id, State.ROLLBACK, 0, signature));
                throw new IllegalStateException("the job refuses the half: this clock is " + (stored.timestamp() - signedAt)
                        + " ms off that of Kafka, or the send took as long");
            }
        } catch (ExecutionException error) {
            if (!isCertainlyNotStored(error.getCause())) {
                rollBack(id, signature, error);
            }
            throw error;
        } catch (InterruptedException error) {
            rollBack(id, signature, error);
            throw error;
        }
        State state = localTransaction.apply(id);
        note(id, 0, state);
        producer.send(op(id, state, 0, signature));
        return state;
    }

    private void rollBack(String id, Header signature, Exception error) {
        try {
            producer.send(op(id, State.ROLLBACK, 0, signature));
        } catch (KafkaException second) {
            error.addSuppressed(second);  // A check asks.
        }
    }

    /** After any other error the topic may hold the half: an earlier try may have been stored. */
    private static boolean isCertainlyNotStored(Throwable error) {
        return error instanceof RecordTooLargeException || error instanceof AuthorizationException
                || error instanceof InvalidTopicException || error instanceof InvalidRecordException;
    }

    /** Answers the checks that have arrived, from durable data. Returns how many it answered. After an error, call it again. */
    public int answerChecks(Function<String, State> lookUp) throws ExecutionException, InterruptedException {
        ConsumerRecords<byte[], byte[]> arrived = checks.poll(Duration.ofMillis(500));
        boolean areAnswered = false;
        try {
            var answers = new ArrayList<Future<RecordMetadata>>();
            for (ConsumerRecord<byte[], byte[]> check : arrived) {
                if (isCheck(check) && isSigned(check)) {
                    answers.add(producer.send(answer(check, lookUp)));
                }
            }
            for (Future<RecordMetadata> answer : answers) {
                answer.get();
            }
            checks.commitSync();  // Kafka has acknowledged every answer
            areAnswered = true;
            return answers.size();
        } finally {
            if (!areAnswered) {
                // The next poll returns these checks again. Without this, the next commit would pass them.
                for (TopicPartition partition : arrived.partitions()) {
                    checks.seek(partition, arrived.records(partition).get(0).offset());
                }
            }
        }
    }

    @Override
    public void close() {
        producer.close();
        checks.close();
    }

    private ProducerRecord<byte[], byte[]> answer(
            ConsumerRecord<byte[], byte[]> check, Function<String, State> lookUp) {
        String id = new String(check.key(), UTF_8);
        String header = text(check.headers(), "INCARNATION");
        int incarnation = header == null ? 0 : Integer.parseInt(header);
        State state = verdicts.get(incarnation + ":" + id);
        String remark = null;
        if (state == null) {
            try {
                state = Objects.requireNonNull(lookUp.apply(id), "the look-up says nothing");
            } catch (Exception | LinkageError error) {  // Kotlin, and others, throw checked ones here.
                state = State.UNKNOWN;  // It is asked again. One such transaction must not hold up the others.
                remark = error.getClass().getName();
            }
            note(id, incarnation, state);
        }
        return op(id, state, incarnation, check.headers().lastHeader("SIGNATURE"),
                "FROM_CHECK", "true", "CHECK_TIMES", text(check.headers(), "TRANSACTION_CHECK_TIMES"), "REMARK", remark);
    }

    /** Anyone may write to the check topic. What is no check is passed over: it would come again with each poll. */
    private boolean isCheck(ConsumerRecord<byte[], byte[]> record) {
        String times = text(record.headers(), "TRANSACTION_CHECK_TIMES");
        String incarnation = text(record.headers(), "INCARNATION");
        return record.key() != null
                && group.equals(text(record.headers(), "PGROUP"))
                && times != null && times.matches("[0-9]{1,9}")
                && (incarnation == null || incarnation.matches("[0-9]{1,9}"));
    }

    private void note(String id, int incarnation, State state) {
        if (state != State.UNKNOWN) {
            verdicts.put(incarnation + ":" + id, state);
        }
    }

    private ProducerRecord<byte[], byte[]> op(
            String id, State state, int incarnation, Header halfSignature, String... others) {
        var op = new ProducerRecord<byte[], byte[]>(opTopic, id.getBytes(UTF_8), null);
        op.headers().add("ACTION", state.name().getBytes(UTF_8)).add("PGROUP", group.getBytes(UTF_8));
        op.headers().add("INCARNATION", Integer.toString(incarnation).getBytes(UTF_8));
        for (int at = 0; at < others.length; at += 2) {
            if (others[at + 1] != null) {
                op.headers().add(others[at], others[at + 1].getBytes(UTF_8));
            }
        }
        if (halfSignature != null) {
            op.headers().add("HALF_SIGNATURE", halfSignature.value());
        }
        if (signingKey != null) {
            sign(op);
        }
        return op;
    }

    private void sign(ProducerRecord<byte[], byte[]> record) {
        String signature = signature(record.topic(), record.key(), record.value(), record.headers(), "SIGNATURE");
        record.headers().add("SIGNATURE", signature.getBytes(UTF_8));
    }

    private boolean isSigned(ConsumerRecord<byte[], byte[]> check) {
        if (signingKey == null) {
            return true;
        }
        Header said = check.headers().lastHeader("CHECK_SIGNATURE");
        String right = signature(checkTopic, check.key(), check.value(), check.headers(), "CHECK_SIGNATURE");
        return said != null && MessageDigest.isEqual(said.value(), right.getBytes(UTF_8));
    }

    /** The signature of a record, as docs/contract.md has it: over all headers but the one that holds it. */
    private String signature(String topic, byte[] key, byte[] value, Headers headers, String without) {
        try {
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(signingKey.getBytes(UTF_8), "HmacSHA256"));
            byte[] digest = MessageDigest.getInstance("SHA-256").digest(value == null ? new byte[0] : value);
            for (String text : List.of("halfway-1", cluster, topic, "")) {
                update(mac, text.getBytes(UTF_8));
            }
            update(mac, key);
            update(mac, digest);
            for (Header header : headers) {
                if (!header.key().equals(without)) {
                    update(mac, header.key().getBytes(UTF_8));
                    update(mac, header.value());
                }
            }
            return HexFormat.of().formatHex(mac.doFinal());
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error);
        }
    }

    private static void update(Mac mac, byte[] field) {
        mac.update(ByteBuffer.allocate(4).putInt(field == null ? -1 : field.length).array());
        if (field != null) {
            mac.update(field);
        }
    }

    private static String text(Headers headers, String name) {
        Header header = headers.lastHeader(name);
        return header == null || header.value() == null ? null : new String(header.value(), UTF_8);
    }

    /** Without a committed offset, Kafka forgets the group with its last member, and its checks would count. */
    private final class CommitsWhereItBegins implements ConsumerRebalanceListener {
        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            var begins = new HashMap<TopicPartition, OffsetAndMetadata>();
            partitions.forEach(partition -> begins.put(partition, new OffsetAndMetadata(checks.position(partition))));
            checks.commitSync(begins);
        }

        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}
    }

    /** Sends one message of each state, then answers checks until the job has asked about the UNKNOWN one. */
    public static void main(String[] arguments) throws Exception {
        try (var client = new TransactionClient(arguments[0], "java-service", arguments[1], arguments[2], arguments[3])) {
            String prefix = arguments.length > 4 ? arguments[4] : "java-" + UUID.randomUUID() + "-";
            for (State state : State.values()) {
                String id = prefix + state.name().toLowerCase();
                client.sendInTransaction(id, "orders", ("body of " + id).getBytes(UTF_8), any -> state);
                System.out.println("half " + id);
            }
            client.producer.flush();
            System.out.println("sent");
            while (client.answerChecks(id -> State.COMMIT) == 0) {
                // No check has arrived yet.
            }
        }
    }
}
