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

int put_record(struct record record) {
    struct process *own = process();
    acquire(&own->records_lock);
    int is_put = grow(own);
    if (is_put) {
        insert(own->records, own->record_capacity, record);
        own->record_count++;
    }
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

struct search { enum kind kind; uint64_t begin, end, context; };

static int matches(const struct record *record, const struct search *search) {
    if (search->context)
        return record->kind && record->context == search->context;
    return record->kind == search->kind && record->key >= search->begin && record->key < search->end;
}

static int take_match(struct search search, struct record *found) {
    struct process *own = process();
    struct record *match = NULL;
    acquire(&own->records_lock);
    for (uint64_t at = 0; at < own->record_capacity && !match; at++)
        if (matches(&own->records[at], &search))
            match = &own->records[at];
    int exists = get(own, match, found, 1);
    let_go(&own->records_lock);
    return exists;
}

int take_record_of_context(uint64_t context, struct record *found) {
    return context && take_match((struct search){.context = context}, found);
}

int take_record_in_range(enum kind kind, uint64_t begin, uint64_t end, struct record *found) {
    return take_match((struct search){.kind = kind, .begin = begin, .end = end}, found);
}

int find_containing(enum kind kind, uint64_t address, struct record *found) {
    struct process *own = process();
    int exists = 0;
    acquire(&own->records_lock);
    for (uint64_t at = 0; at < own->record_capacity && !exists; at++) {
        struct record *each = &own->records[at];
        if (each->kind == kind && each->key <= address && address - each->key < each->bytes)
            exists = get(own, each, found, 0);
    }
    let_go(&own->records_lock);
    return exists;
}

void each_record(enum kind kind, void (*act)(struct record *record, void *argument), void *argument) {
    struct process *own = process();
    acquire(&own->records_lock);
    for (uint64_t at = 0; at < own->record_capacity; at++)
        if (own->records[at].kind == kind)
            act(&own->records[at], argument);
    let_go(&own->records_lock);
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
    if (record) {
        record->handles += (uint32_t)handles;
        record->mappings += (uint32_t)mappings;
        is_last = !record->handles && !record->mappings;
        get(own, record, found, is_last);
    }
    let_go(&own->records_lock);
    return is_last;
}
