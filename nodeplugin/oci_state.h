/* What the hooks of the OCI runtime share: reading the runtime's JSON, and ending with a reason.
 *
 * The JSON is the runtime's and well-formed, but has strings of the tenant: so it is read as JSON, not searched.
 */
#ifndef OCI_STATE_H
#define OCI_STATE_H

/* Defined by each hook: what its failure means for the container, and a remedy, which may be empty. */
extern const char FAILURE[], REMEDY[];

/* Prints why the container cannot start, with errno if it is set, and ends the program. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Returns the whole content of a file. */
char *read_all(int file, const char *name);

/* Returns the value of a key of an object, NULL if there is none. */
const char *member(const char *object, const char *key);

/* Returns a string; those with escapes are none that a runtime has, and are refused. */
char *text_in(const char *value, const char *name);

/* Returns a positive number of at most nine digits, as a process id is. */
long number_in(const char *value, const char *name);

#endif
