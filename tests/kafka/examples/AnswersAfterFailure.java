import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.common.errors.InterruptException;

/** Is interrupted at the second look-up, and fails at the third. Goes on until it has answered; prints how many at each try. */
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
                        if (asked.get() == 3) {
                            throw new AssertionError();
                        }
                        return TransactionClient.State.COMMIT;
                    });
                } catch (InterruptedException | InterruptException | AssertionError error) {
                    Thread.interrupted();
                    System.out.println("failed");
                }
            }
        }
        System.out.println(answered);
    }
}
