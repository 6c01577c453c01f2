-- unchanged "omit" of add_table().

alter table gdq.captured_table
  drop constraint captured_table_unchanged,
  add constraint captured_table_unchanged check (unchanged in ('both', 'once', 'omit'));
comment on column gdq.captured_table.unchanged is 'How often an UPDATE logs a large value that it leaves as it was: both: in both images; once: in the new image; omit: not at all.';
