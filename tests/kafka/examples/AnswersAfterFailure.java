import java.util.concurrent.atomic.AtomicInteger;

/** Fails to answer the second check once. Goes on until it has answered, and prints how many at each try. */
public final class AnswersAfterFailure {
    public static void main(String[] arguments) throws Exception {
        var asked = new AtomicInteger();
        int answered = 0;
        try (var client = new TransactionClient(arguments[0], "g", arguments[1], arguments[2], arguments[3])) {
            while (answered == 0) {
                try {
                    answered = client.answerChecks(id -> {
                        if (asked.incrementAndGet() == 2) {
                            throw new IllegalStateException("the database does not answer");
                        }
                        return TransactionClient.State.COMMIT;
                    });
                } catch (IllegalStateException error) {
                    System.out.println("failed");
                }
            }
        }
        System.out.println(answered);
    }
}
