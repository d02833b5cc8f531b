import java.util.ArrayList;
import java.util.Locale;
import java.util.UUID;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.LongAdder;

/**
 * A service under load: {@code TransactionLoad SERVERS HALF OP CHECK GROUP SECONDS RATE THREADS}.
 *
 * <p>Each thread sends transactions of 1 KiB through the contract's example client, and commits every one. With RATE 0
 * it sends the next one when the last is decided, else at its share of RATE a second. Without threads the service only
 * answers checks, by COMMIT. It ends after SECONDS or at SIGTERM, and prints what it did as JSON.
 */
public final class TransactionLoad {
    private static volatile boolean stopping;

    public static void main(String[] arguments) throws Exception {
        double seconds = Double.parseDouble(arguments[5]);
        double rate = Double.parseDouble(arguments[6]);
        int threads = Integer.parseInt(arguments[7]);
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> stop(main)));
        var done = new LongAdder();
        long began;
        try (var client = new TransactionClient(arguments[0], arguments[4], arguments[1], arguments[2], arguments[3])) {
            began = System.nanoTime();
            long end = began + (long) (seconds * 1e9);
            if (threads == 0) {
                while (!stopping && System.nanoTime() < end) {
                    done.add(client.answerChecks(id -> TransactionClient.State.COMMIT));
                }
            } else {
                sendAll(client, threads, end, rate / threads, done);
            }
        }
        double took = (System.nanoTime() - began) / 1e9;
        System.out.printf(Locale.ROOT, "{\"%s\": %d, \"seconds\": %.3f, \"per_second\": %.1f}%n",
                threads == 0 ? "answered" : "transactions", done.sum(), took, done.sum() / took);
    }

    private static void sendAll(TransactionClient client, int threads, long end, double rate, LongAdder done)
            throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(threads);
        var running = new ArrayList<Future<Void>>();
        for (int number = 0; number < threads; number++) {
            running.add(pool.submit(() -> {
                send(client, end, rate, done);
                return null;
            }));
        }
        pool.shutdown();
        for (Future<Void> one : running) {
            one.get();
        }
    }

    private static void send(TransactionClient client, long end, double rate, LongAdder done) throws Exception {
        var random = ThreadLocalRandom.current();
        long due = System.nanoTime();
        while (!stopping && System.nanoTime() < end) {
            if (rate > 0) {
                due += (long) (1e9 / rate * random.nextDouble(0.5, 1.5));
                Thread.sleep(Math.max(0, (due - System.nanoTime()) / 1_000_000));
            }
            byte[] body = new byte[1024];
            random.nextBytes(body);
            String id = new UUID(random.nextLong(), random.nextLong()).toString();
            client.sendInTransaction(id, "orders", body, any -> TransactionClient.State.COMMIT);
            done.increment();
        }
    }

    private static void stop(Thread main) {
        stopping = true;
        try {
            main.join();
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }
}
