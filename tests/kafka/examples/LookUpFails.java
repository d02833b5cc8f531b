import java.sql.SQLException;

/** Answers three checks. The look-up of one of them throws a checked exception, as Kotlin may. */
public final class LookUpFails {
    public static void main(String[] arguments) throws Exception {
        try (var client = new TransactionClient(arguments[0], "g", arguments[1], arguments[2], arguments[3])) {
            for (int answered = 0; answered < 3; ) {
                answered += client.answerChecks(id -> {
                    if (id.equals("b")) {
                        LookUpFails.<RuntimeException>raise(new SQLException("Ada, 12 High Street"));
                    }
                    return TransactionClient.State.COMMIT;
                });
            }
        }
    }

    @SuppressWarnings("unchecked")
    private static <E extends Exception> void raise(Exception error) throws E {
        throw (E) error;
    }
}
