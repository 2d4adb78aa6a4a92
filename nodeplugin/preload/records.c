#include "records.h"

#include <stddef.h>

#include "process.h"

#define FIRST_CAPACITY 1024

/* An open-addressing table; a record that is taken has those behind it moved up, so nothing marks its place. */

static uint64_t place_of(enum kind kind, uint64_t key, uint64_t capacity) {
    uint64_t mixed = (key ^ (uint64_t)kind << 56) * 0x9e3779b97f4a7c15u;
    return (mixed ^ mixed >> 29) & (capacity - 1);
}

static void insert(struct record *records, uint64_t capacity, struct record record) {
    uint64_t at = place_of(record.kind, record.key, capacity);
    while (records[at].kind)
        at = (at + 1) & (capacity - 1);
    records[at] = record;
}

static int grow(struct process *own) {
    if (own->records && own->record_count * 2 < own->record_capacity)
        return 1;
    uint64_t capacity = own->records ? own->record_capacity * 2 : FIRST_CAPACITY;
    struct record *larger = allocate_pages(capacity * sizeof *larger);
    if (!larger)
        return 0;
    for (uint64_t at = 0; at < own->record_capacity; at++)
        if (own->records[at].kind)
            insert(larger, capacity, own->records[at]);
    if (own->records)
        free_pages(own->records, own->record_capacity * sizeof *larger);
    own->records = larger, own->record_capacity = capacity;
    return 1;
}

static struct record *locate(struct process *own, enum kind kind, uint64_t key) {
    if (!own->records)
        return NULL;
    for (uint64_t at = place_of(kind, key, own->record_capacity); own->records[at].kind;
         at = (at + 1) & (own->record_capacity - 1))
        if (own->records[at].kind == kind && own->records[at].key == key)
            return &own->records[at];
    return NULL;
}

static void delete(struct process *own, struct record *record) {
    uint64_t mask = own->record_capacity - 1, hole = (uint64_t)(record - own->records);
    for (uint64_t at = (hole + 1) & mask; own->records[at].kind; at = (at + 1) & mask) {
        uint64_t wanted = place_of(own->records[at].kind, own->records[at].key, own->record_capacity);
        if (((at - wanted) & mask) >= ((at - hole) & mask))
            own->records[hole] = own->records[at], hole = at;
    }
    own->records[hole].kind = NO_RECORD;
    own->record_count--;
}

static struct record *add(struct process *own, struct record record) {
    if (!grow(own))
        return NULL;
    insert(own->records, own->record_capacity, record);
    own->record_count++;
    return locate(own, record.kind, record.key);
}

int put_record(struct record record) {
    struct process *own = process();
    acquire(&own->records_lock);
    int is_put = add(own, record) != NULL;
    let_go(&own->records_lock);
    return is_put;
}

static int get(struct process *own, struct record *record, struct record *found, int takes) {
    if (record && found)
        *found = *record;
    if (record && takes)
        delete (own, record);
    return record != NULL;
}

int find_record(enum kind kind, uint64_t key, struct record *found) {
    struct process *own = process();
    acquire(&own->records_lock);
    int exists = get(own, locate(own, kind, key), found, 0);
    let_go(&own->records_lock);
    return exists;
}

int take_record(enum kind kind, uint64_t key, struct record *found) {
    struct process *own = process();
    acquire(&own->records_lock);
    int exists = get(own, locate(own, kind, key), found, 1);
    let_go(&own->records_lock);
    return exists;
}

/* Each search begins where the last one ended: so all records of a context are taken in two rounds of the table. */
int take_record_of_context(uint64_t context, struct record *found) {
    struct process *own = process();
    struct record *match = NULL;
    acquire(&own->records_lock);
    for (uint64_t tried = 0; context && tried < own->record_capacity && !match; tried++) {
        uint64_t at = own->search_start & (own->record_capacity - 1);
        if (own->records[at].kind && own->records[at].context == context)
            match = &own->records[at];
        else
            own->search_start++;
    }
    int exists = get(own, match, found, 1);
    let_go(&own->records_lock);
    return exists;
}

int find_containing(enum kind kind, uint64_t address, struct record *found) {
    struct process *own = process();
    acquire(&own->records_lock);
    /* Usually it is the beginning that is asked for. */
    int exists = get(own, locate(own, kind, address), found, 0);
    for (uint64_t at = 0; at < own->record_capacity && !exists; at++) {
        struct record *each = &own->records[at];
        if (each->kind == kind && each->key <= address && address - each->key < each->bytes)
            exists = get(own, each, found, 0);
    }
    let_go(&own->records_lock);
    return exists;
}

int next_record(enum kind kind, uint64_t *place, struct record *found) {
    struct process *own = process();
    int exists = 0;
    acquire(&own->records_lock);
    while (!exists && *place < own->record_capacity) {
        struct record *each = &own->records[(*place)++];
        exists = each->kind == kind && get(own, each, found, 0);
    }
    let_go(&own->records_lock);
    return exists;
}

void change_record(const struct record *record) {
    struct process *own = process();
    acquire(&own->records_lock);
    struct record *changed = locate(own, record->kind, record->key);
    if (changed)
        *changed = *record;
    let_go(&own->records_lock);
}

uint32_t count_in_block(uint64_t block, unsigned card, uint64_t context, int number) {
    struct process *own = process();
    acquire(&own->records_lock);
    struct record *record = locate(own, SMALLS, block);
    if (!record && number > 0)
        record = add(own, (struct record){.kind = SMALLS, .key = block, .card = (uint8_t)card, .object = context});
    uint32_t left = record ? record->handles += (uint32_t)number : 0;
    if (record && !left)
        delete (own, record);
    let_go(&own->records_lock);
    return left;
}

uint64_t put_object(uint64_t bytes, unsigned card, int shared) {
    struct process *own = process();
    acquire(&own->records_lock);
    uint64_t object = ++own->next_object;
    let_go(&own->records_lock);
    struct record record = {.kind = OBJECT, .key = object, .bytes = bytes, .card = (uint8_t)card, .shared = shared, .handles = 1};
    return put_record(record) ? object : 0;
}

int count_object(uint64_t object, int handles, int mappings, struct record *found) {
    struct process *own = process();
    acquire(&own->records_lock);
    struct record *record = locate(own, OBJECT, object);
    int is_last = 0;
    if (found)
        *found = (struct record){.kind = NO_RECORD};
    if (record) {
        record->handles += (uint32_t)handles;
        record->mappings += (uint32_t)mappings;
        is_last = !record->handles && !record->mappings;
        get(own, record, found, is_last);
    }
    let_go(&own->records_lock);
    return is_last;
}
