#!/bin/sh
# Installs gdq, and captures the table orders for the consumer mirror. It may run again: what is done stays done.
set -eu
gdq install
gdq create-queue shop
gdq add-table shop public.orders
gdq register-consumer shop mirror
