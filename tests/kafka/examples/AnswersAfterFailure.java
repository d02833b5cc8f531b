import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.common.errors.InterruptException;

/** Fails at the first look-up, and is interrupted at the next. Goes on until it has answered; prints how many at each try. */
public final class AnswersAfterFailure {
    public static void main(String[] arguments) throws Exception {
        var asked = new AtomicInteger();
        int answered = 0;
        try (var client = new TransactionClient(arguments[0], "g", arguments[1], arguments[2], arguments[3])) {
            while (answered == 0) {
                try {
                    answered = client.answerChecks(id -> {
                        int time = asked.incrementAndGet();
                        if (time == 1) {
                            throw new AssertionError();
                        } else if (time == 2) {
                            Thread.currentThread().interrupt();
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
