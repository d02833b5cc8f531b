import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.common.errors.InterruptException;

/** Is interrupted once while it answers the second check. Goes on until it has answered, and prints how many at each try. */
public final class AnswersAfterFailure {
    public static void main(String[] arguments) throws Exception {
        var asked = new AtomicInteger();
        int answered = 0;
        try (var client = new TransactionClient(arguments[0], "g", arguments[1], arguments[2], arguments[3])) {
            while (answered == 0) {
                try {
                    answered = client.answerChecks(id -> {
                        if (asked.incrementAndGet() == 2) {
                            Thread.currentThread().interrupt();
                        }
                        return TransactionClient.State.COMMIT;
                    });
                } catch (InterruptedException | InterruptException error) {
                    Thread.interrupted();
                    System.out.println("failed");
                }
            }
        }
        System.out.println(answered);
    }
}
